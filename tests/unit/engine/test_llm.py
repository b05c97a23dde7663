"""What is wrong with a model's setting is one line before the model is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import AnyPlan

from parlay.engine import llm
from parlay.engine.draft_format import save_draft
from parlay.engine.model_config import ModelConfig, from_hf
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.policies.types import Proposer

SMALL = EngineConfig(context_tokens=64, target_blocks=16, draft_blocks=16)


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
    with pytest.raises(ValueError, match="torch sees no GPU; use cpu"):
        llm.load_backend(tmp_path, device="cuda")


def checkpoint(folder: Path, context: int) -> Path:
    """Write a random Llama of one layer that has read up to `context` tokens."""
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
    rng = torch.Generator().manual_seed(context)
    shapes = from_hf(config).tensor_shapes()
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_draft_of_a_shorter_context_is_refused(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path / "target", 64), checkpoint(tmp_path / "draft", 32)
    with pytest.raises(ValueError, match="context is 32 tokens, the engine's 64"):
        llm.load_backend(target, draft)


def draft_file(path: Path, target: Path) -> Path:
    """Write a random draft that reads the target's embedding and the states behind its layer."""
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    config = ModelConfig(
        hidden=8, layers=1, heads=2, kv_heads=2, head_dim=4, ffn=8, vocab=16, rope_theta=10000.0,
        norm_eps=1e-5, context=64, tied=False, eos_ids=(), state_layers=(1,),
    )  # fmt: skip
    shapes = config.tensor_shapes() | {"state_proj.weight": (8, 8)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_draft(path, config, weights, torch.arange(16), embedding, {})
    return path


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize(
    ("dtype", "draft_dtype", "expected"),
    [
        ("float32", None, torch.float32),
        ("float32", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_a_draft_has_the_targets_dtype_or_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: str,
    draft_dtype: str | None,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(llm, "load_tokenizer", lambda _: None)
    target, path = checkpoint(tmp_path / "target", 64), tmp_path / "draft"
    if kind == "folder":
        checkpoint(path, 64)
    else:
        draft_file(path, target)
    backend, _ = llm.load_backend(
        target, path, dtype, draft_dtype=draft_dtype, draft_device="cpu", config=SMALL
    )
    assert backend.draft is not None
    model, own = backend.draft.runner.model, llm.DTYPES[dtype]
    assert (backend.target.dtype, model.dtype) == (own, expected)
    assert model.device == backend.draft.ids.device == torch.device("cpu")
    # An embedding that a coarser target has is not what a finer draft reads.
    exact = load_file((target if kind == "file" else path) / "model.safetensors")
    wanted = exact["model.embed_tokens.weight"].to(expected)
    assert torch.equal(model.embedding, wanted)
    assert (model.embedding is backend.target.embedding) == (kind == "file" and own is expected)
    engine = Engine(backend, LocalPlanner(AnyPlan((Proposer.DRAFT_MODEL,), 3)), SMALL)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=20))
    while engine.has_work:
        engine.step()
    assert request.drafted > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_dtype": "int4"}, "unknown dtype 'int4'"),
        ({"draft_device": "fridge"}, "unknown device 'fridge'"),
    ],
)
def test_a_draft_where_none_can_be(tmp_path: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.load_backend(tmp_path, **options)  # type: ignore[arg-type]
