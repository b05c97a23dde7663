"""What is wrong with a model's setting is one line before the model is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parlay.engine import llm
from parlay.engine.model_config import from_hf


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"threads": -1}, "threads must be at least 1, not -1"),
        ({"device": "mps"}, "device 'mps' is not supported; use cpu or cuda"),
        ({"device": "fridge"}, "unknown device 'fridge'; use cpu or cuda"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.load_backend(tmp_path, **options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torch sees no GPU; use --device cpu"):
        llm.load_backend(tmp_path, device="cuda")


def checkpoint(folder: Path, context: int) -> Path:
    """Write a Llama of one layer that has read up to `context` tokens."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 8,
        "max_position_embeddings": context,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "vocab_size": 16,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.ones(shape) for name, shape in from_hf(config).tensor_shapes().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_draft_of_a_shorter_context_is_refused(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path / "target", 64), checkpoint(tmp_path / "draft", 32)
    with pytest.raises(ValueError, match="context is 32 tokens, the engine's 64"):
        llm.load_backend(target, draft)
