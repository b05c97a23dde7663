from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parlay.engine.draft_format import load_draft, read_card, save_draft
from parlay.engine.model_config import ModelConfig

CONFIG = ModelConfig(
    hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=20,
    rope_theta=10000.0, norm_eps=1e-5, context=64, tied=False, eos_ids=(),
)  # fmt: skip
EMBEDDING = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(0, 40, 2)


def weights() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(2)
    return {n: torch.randn(s, generator=rng) for n, s in CONFIG.tensor_shapes().items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "draft.safetensors"
    save_draft(path, CONFIG, weights(), IDS, EMBEDDING, {"seed": 3})
    return path


def test_round_trip_within_an_int8_step(saved: Path) -> None:
    config, found, ids = load_draft(saved, EMBEDDING)
    assert config == CONFIG
    assert torch.equal(ids, IDS)
    assert read_card(saved) == {"seed": 3}
    wanted = weights()
    del wanted["model.embed_tokens.weight"]
    assert found.keys() == wanted.keys()
    for name, w in wanted.items():
        step = w.abs().amax(-1, keepdim=True) / 127
        assert found[name].dtype is torch.bfloat16
        bound = 2**-8 * w.abs() + (0.51 * step if w.dim() == 2 else 0)
        assert ((found[name].float() - w).abs() <= bound).all(), name


def test_same_embedding_in_another_dtype_is_the_same_target(saved: Path) -> None:
    load_draft(saved, EMBEDDING.bfloat16())


def refusal(path: Path, embedding: Tensor = EMBEDDING) -> str:
    with pytest.raises(ValueError, match="draft") as caught:
        load_draft(path, embedding)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refuses_another_target(saved: Path) -> None:
    assert "another target" in refusal(saved, EMBEDDING + 0.1)


def test_refuses_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path / "none.safetensors")
    assert "missing" in refusal(tmp_path)


def test_refuses_a_cut_file(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-100])
    assert "damaged" in refusal(saved)


def test_refuses_other_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    assert "not a draft" in refusal(path)


def rewritten(
    path: Path, drop: str = "", put: Mapping[str, Tensor] | None = None, **header: object
) -> None:
    with safe_open(path, framework="pt") as opened:
        old = json.loads(opened.metadata()["draft"])
        tensors = {n: opened.get_tensor(n) for n in opened.keys() if n != drop}  # noqa: SIM118
    save_file({**tensors, **(put or {})}, path, {"draft": json.dumps({**old, **header})})


def test_refuses_another_version(saved: Path) -> None:
    rewritten(saved, version=2)
    assert "format 2" in refusal(saved)


@pytest.mark.parametrize(
    "name", ["vocab", "lm_head.weight", "model.norm.weight", "lm_head.weight.scale"]
)
def test_refuses_a_missing_tensor(saved: Path, name: str) -> None:
    rewritten(saved, drop=name)
    assert "damaged" in refusal(saved)


def test_refuses_sizes_that_do_not_fit(saved: Path) -> None:
    config = {n: v for n, v in dataclasses.asdict(CONFIG).items() if n != "traits"}
    rewritten(saved, config={**config, "ffn": 25})
    assert "gate_proj" in refusal(saved)
    rewritten(saved, config={**config, "heads": 3})
    assert "config" in refusal(saved)
    rewritten(saved, config=dataclasses.asdict(CONFIG))
    assert "a draft is a plain Llama" in refusal(saved)
    rewritten(saved, config={"hidden": 16})
    assert "config" in refusal(saved)


def test_refuses_ids_outside_the_target(saved: Path) -> None:
    path = saved
    save_draft(path, CONFIG, weights(), IDS + 2, EMBEDDING, {})
    assert "token ids" in refusal(path)


def test_refuses_deep_metadata(saved: Path) -> None:
    save_file({"a": torch.zeros(2)}, saved, {"draft": "[" * 100_000})
    assert "damaged" in refusal(saved)


@pytest.mark.parametrize("value", [0, -1, None, "x", 10**12, 2.5, [1], float("nan")])
@pytest.mark.parametrize("size", ["hidden", "layers", "heads", "head_dim", "vocab", "context"])
def test_refuses_sizes_that_are_none(saved: Path, size: str, value: object) -> None:
    config = {n: v for n, v in dataclasses.asdict(CONFIG).items() if n != "traits"}
    rewritten(saved, config={**config, size: value})
    assert "damaged" in refusal(saved)


@pytest.mark.parametrize("value", [0, -1, None, "x", [1], float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["norm_eps", "rope_theta"])
def test_refuses_factors_that_are_not_above_0(saved: Path, name: str, value: object) -> None:
    config = {n: v for n, v in dataclasses.asdict(CONFIG).items() if n != "traits"}
    rewritten(saved, config={**config, name: value})
    assert f"{name} must be a number above 0" in refusal(saved)


@pytest.mark.parametrize("name", ["eos_ids", "state_layers"])
@pytest.mark.parametrize("value", [["x"], [1.5], 3, [[1]]])
def test_refuses_lists_of_other_than_whole_numbers(saved: Path, name: str, value: object) -> None:
    config = {n: v for n, v in dataclasses.asdict(CONFIG).items() if n != "traits"}
    rewritten(saved, config={**config, name: value})
    assert "config" in refusal(saved)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("vocab", IDS.float()),
        ("lm_head.weight.scale", torch.full((20,), float("nan"))),
        ("model.norm.weight", torch.full((16,), float("inf"))),
        ("model.norm.weight", torch.ones(16, dtype=torch.int8)),
    ],
)
def test_refuses_numbers_that_cannot_be(saved: Path, name: str, tensor: Tensor) -> None:
    rewritten(saved, put={name: tensor})
    assert "damaged" in refusal(saved)
