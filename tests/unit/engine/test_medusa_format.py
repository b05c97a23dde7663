"""Files of Medusa heads: ours, and the layout of public checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.tiny import tiny_config, tiny_llama
from tests.tiny_heads import rooted_config, rooted_weights
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.medusa_format import (
    OfTarget,
    load_heads,
    read_heads_card,
    save_heads,
)
from parlay.engine.medusa_heads import HeadsConfig, PlainHeads, RootedHeads, children
from parlay.engine.medusa_linear import quick_linear

VOCAB, HIDDEN = 12, 16
EMBEDDING = tiny_llama(VOCAB, 2, 3).embedding.bfloat16().float()
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
TARGET = OfTarget(tiny_config(VOCAB, 2), EMBEDDING, HEAD)
IDS = torch.tensor([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    config = rooted_config(VOCAB)
    path = tmp_path / "heads.safetensors"
    save_heads(path, config, rooted_weights(config), IDS, EMBEDDING, {"seed": 4})
    return path


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_what_is_saved_comes_back_but_for_rounding(file: Path) -> None:
    heads = load_heads(file, TARGET)
    assert isinstance(heads, RootedHeads)
    assert (heads.heads, heads.state_layers, heads.ids.tolist()) == (4, (1, 2), IDS.tolist())
    assert read_heads_card(file) == {"seed": 4}
    config = rooted_config(VOCAB)
    exact = RootedHeads(config, rooted_weights(config), EMBEDDING, HEAD, IDS)
    states, tokens = torch.randn(7, 2 * HIDDEN), torch.arange(7)
    x, y = heads.begin(states), exact.begin(states)
    for place in range(4):
        (x, found), (y, wanted) = heads.step(place, x, tokens), exact.step(place, y, tokens)
        assert float((found - wanted).norm() / wanted.norm()) < 0.1


def test_a_head_is_the_formula_it_is_said_to_be() -> None:
    config = dataclasses.replace(rooted_config(VOCAB), blocks=(1, 0))
    w = rooted_weights(config)
    heads = RootedHeads(config, w, EMBEDDING, HEAD, IDS)
    states, root, guess = torch.randn(3, 2 * HIDDEN), torch.tensor([1, 4, 9]), torch.arange(3)

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    read = [norm(states[:, :HIDDEN]), norm(states[:, HIDDEN:]), norm(EMBEDDING[root])]
    x = torch.cat(read, 1) @ w["heads.0.in_proj.weight"].T
    gate, up = (norm(x) @ w[f"heads.0.layers.0.{n}_proj.weight"].T for n in ("gate", "up"))
    x = x + (F.silu(gate) * up) @ w["heads.0.layers.0.down_proj.weight"].T
    carried, logits = heads.step(0, heads.begin(states), root)
    torch.testing.assert_close(logits, norm(x) @ HEAD[IDS].T, atol=1e-4, rtol=1e-4)
    y = x + torch.cat([norm(x), norm(EMBEDDING[guess])], 1) @ w["heads.1.in_proj.weight"].T
    for place in (1, 2):
        found = heads.step(place, carried, guess)[1]
        torch.testing.assert_close(found, norm(y) @ HEAD[IDS].T, atol=1e-4, rtol=1e-4)


def test_children_are_the_likeliest_behind_the_first_guesses(file: Path) -> None:
    heads = load_heads(file, TARGET)
    states, roots = torch.randn(5, 2 * HIDDEN), torch.arange(5)
    ids, probs = children(heads, states, roots, 3)
    assert ids.shape == probs.shape == (5, 4, 3)
    x, token = heads.begin(states), roots
    for place in range(4):
        x, logits = heads.step(place, x, token)
        order = logits.argsort(-1, descending=True)[:, :3]
        assert torch.equal(ids[:, place], heads.ids[order])
        torch.testing.assert_close(probs[:, place], logits.softmax(-1).gather(1, order))
        token = ids[:, place, 0]


def rewritten(
    file: Path, header: Callable[[dict[str, object]], None], tensors: dict[str, Tensor]
) -> None:
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["heads"])
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    header(facts)
    save_file({**kept, **tensors}, file, {"heads": json.dumps(facts)})


@pytest.mark.parametrize(
    ("header", "tensors", "said"),
    [
        (lambda h: h.update(version=9), {}, "format 9"),
        (lambda h: h.update(target_embedding="?"), {}, "another target"),
        (lambda h: h["config"].pop("ffn"), {}, "config"),
        (lambda h: h["config"].update(blocks=[]), {}, "blocks"),
        (lambda h: h["config"].update(state_layers=[2, 1]), {}, "state_layers"),
        (lambda h: h["config"].update(state_layers=[1, 3]), {}, "target's sizes"),
        (lambda h: h["config"].update(heads=10**12), {}, "at most 64"),
        (lambda h: h["config"].update(heads=2.5), {}, "whole numbers"),
        (lambda h: h["config"].update(blocks=[10**12, 0]), {}, "at most 64"),
        (lambda h: h["config"].update(blocks=[1.5, 0]), {}, "whole numbers"),
        (lambda h: h["config"].update(hidden=float("nan")), {}, "whole numbers"),
        (lambda h: h["config"].update(norm_eps=0), {}, "norm_eps"),
        (lambda h: h["config"].update(norm_eps="x"), {}, "norm_eps"),
        (lambda h: h["config"].update(norm_eps=float("nan")), {}, "norm_eps"),
        (lambda h: None, {"vocab": torch.full((11,), 12, dtype=torch.int32)}, "token ids"),
        (lambda h: None, {"vocab": IDS.float()}, "token ids"),
        (lambda h: None, {"heads.0.norm.weight": torch.full((16,), float("nan"))}, "NaN"),
        (
            lambda h: None,
            {"heads.0.in_proj.weight.scale": torch.full((16,), float("nan"))},
            "NaN",
        ),
        (lambda h: None, {"heads.1.norm.weight": torch.ones(3)}, "heads.1.norm.weight"),
        (lambda h: None, {"heads.0.in_proj.weight.scale": torch.ones(3)}, "in_proj.weight.scale"),
    ],
)
def test_damage_is_said_in_one_line(
    file: Path,
    header: Callable[[dict[str, object]], None],
    tensors: dict[str, Tensor],
    said: str,
) -> None:
    rewritten(file, header, tensors)
    with pytest.raises(ValueError, match=said) as error:
        load_heads(file, TARGET)
    assert len(str(error.value).splitlines()) == 1


def test_deep_metadata_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / "deep.safetensors"
    save_file({"a": torch.ones(1)}, deep, {"heads": "[" * 100_000})
    with pytest.raises(ValueError, match="damaged"):
        load_heads(deep, TARGET)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        load_heads(tmp_path / "none", TARGET)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"abc")
    with pytest.raises(ValueError, match="damaged"):
        load_heads(torn, TARGET)
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(1)}, other)
    with pytest.raises(ValueError, match="no heads"):
        load_heads(other, TARGET)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 1, (1,), (4,), (1,), 4), "hidden"),
        ((4, 0, (1,), (4,), (1,), 4), "heads"),
        ((4, 1, (1, 1), (4, 4), (1,), 4), "blocks"),
        ((4, 2, (1, 1), (4,), (1,), 4), "ffn"),
        ((4, 1, (1,), (0,), (1,), 4), "ffn"),
        ((4, 1, (1,), (4,), (), 4), "state_layers"),
        ((4, 1, (1,), (4,), (1,), 0), "vocab"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    sizes: tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        HeadsConfig(*sizes, norm_eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 6), (64, 32), (5, 7)])
def test_the_quickest_linear_is_a_linear(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(11, 2 * shape[1]).to(dtype)
    x = x[:, ::2]
    found = quick_linear(weight)(x)
    torch.testing.assert_close(found, F.linear(x, weight), atol=1e-2, rtol=2e-2)
    assert quick_linear(weight)(x[:0]).shape == (0, shape[0])


def public(folder: Path, name: str, prefix: str = "", layers: int = 2) -> dict[str, Tensor]:
    """Write a made-up checkpoint of three heads in the public layout."""
    rng = torch.Generator().manual_seed(1)
    table: dict[str, Tensor] = {}
    for i in range(3):
        for j in range(layers):
            table[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=rng)
            table[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=rng)
        table[f"{i}.{layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=rng)
    stored = {prefix + key: w for key, w in table.items()}
    folder.mkdir(exist_ok=True)
    if name.endswith(".pt"):
        torch.save(stored, folder / name)
    else:
        save_file(stored, folder / name)
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return table


@pytest.mark.parametrize(
    ("name", "prefix", "layers"),
    [
        ("medusa_lm_head.pt", "", 1),
        ("medusa_lm_head.pt", "medusa_head.", 2),
        ("medusa_lm_head.safetensors", "", 2),
    ],
)
def test_public_checkpoints_load(tmp_path: Path, name: str, prefix: str, layers: int) -> None:
    w = public(tmp_path / "medusa", name, prefix, layers)
    heads = load_heads(tmp_path / "medusa", TARGET)
    assert isinstance(heads, PlainHeads)
    assert (heads.heads, heads.state_layers, len(heads.ids)) == (3, (2,), VOCAB)
    state = torch.randn(4, HIDDEN)
    x = heads.begin(state)
    for i in range(3):
        y = state
        for j in range(layers):
            y = y + F.silu(y @ w[f"{i}.{j}.linear.weight"].T + w[f"{i}.{j}.linear.bias"])
        x, logits = heads.step(i, x, torch.full((4,), i))
        torch.testing.assert_close(logits, y @ w[f"{i}.{layers}.weight"].T, atol=1e-4, rtol=1e-4)


def test_public_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, name = tmp_path / "medusa", "medusa_lm_head.pt"
    folder.mkdir()

    def refused(said: str, target: OfTarget = TARGET) -> None:
        with pytest.raises(ValueError, match=said) as error:
            load_heads(folder, target)
        assert len(str(error.value).splitlines()) == 1

    refused("config.json is missing")
    table = public(folder, name)
    refused("this target needs", OfTarget(tiny_config(13, 2), torch.ones(13, 16), HEAD))
    torch.save({k: w for k, w in table.items() if k != "2.2.weight"}, folder / name)
    refused("2.2.weight is missing")
    torch.save({**table, "2.2.weight": table["2.2.weight"] / 0}, folder / name)
    refused("2.2.weight has NaN or infinity")
    torch.save([1], folder / name)
    refused("not a table")
    (folder / name).write_bytes(b"junk")
    refused("cannot be read")
    (folder / name).unlink()
    refused("needs medusa_lm_head")
    (folder / "config.json").write_text('{"medusa_num_heads": 0}', encoding="utf-8")
    refused("medusa_num_heads")
