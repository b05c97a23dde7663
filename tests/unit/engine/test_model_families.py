"""Qwen2, Qwen3 and Gemma 3 checkpoints against transformers' own models, loaded by path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import CPU, AnyPlan
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from parlay.engine.attention.paged import PagedKV, plan_ragged
from parlay.engine.distill.generate import Decoder
from parlay.engine.distill.llama import target_of
from parlay.engine.kernels import build, native
from parlay.engine.model_config import ModelConfig, from_hf, load_config
from parlay.engine.models import Llama
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.runner import Runner
from parlay.engine.scheduler import EngineConfig
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.engine.traits import LLAMA, Local
from parlay.engine.tree import trees_of
from parlay.engine.weights import load_checkpoint
from parlay.policies.types import Proposer

VOCAB, WINDOW = 60, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def qwen2(**changes: Any) -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | changes))


def qwen2_windowed() -> Any:
    return qwen2(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=1,
    )  # fmt: skip


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=6, rope_parameters={
        "rope_type": "default", "rope_theta": 500.0,
    }))  # fmt: skip


def gemma3() -> Any:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, head_dim=8, query_pre_attn_scalar=5, sliding_window=WINDOW, layer_types=KINDS,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        )
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2": qwen2,
    "qwen2 windowed": qwen2_windowed,
    "qwen3": qwen3,
    "gemma3": gemma3,
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Make a model whose every weight matters, and its checkpoint."""
    torch.manual_seed(0)
    model = FAMILIES[request.param]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    folder = tmp_path_factory.mktemp("family")
    model.save_pretrained(folder)
    return model, folder


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    config, weights = load_checkpoint(folder)
    return Llama(config, weights, weights["model.embed_tokens.weight"], dtype, CPU)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_logits_are_transformers(pair: tuple[Any, Path]) -> None:
    theirs, folder = pair
    ids = tokens(3, 60)
    expected = theirs(ids).logits
    runner = Runner(ours(folder), 48, 4)
    tables = [[row + 3 * i for i in range(16)] for row in range(3)]
    # Prompts in chunks, of more than a window, then decoding and drafts of several lengths.
    for starts, ends in (
        ([0, 0, 0], [40, 5, 9]),
        ([40, 5, 9], [41, 30, 30]),
        ([41, 30, 30], [42, 31, 31]),
        ([42, 31, 31], [47, 32, 40]),
        ([47, 32, 40], [60, 60, 60]),
    ):
        lengths = [e - s for s, e in zip(starts, ends, strict=True)]
        fed = [ids[r, s:e].tolist() for r, (s, e) in enumerate(zip(starts, ends, strict=True))]
        hidden = runner.read(fed, Spans(tables, starts, lengths))
        for row, logits in enumerate(runner.model.logits(hidden).split(lengths)):
            wanted = expected[row, starts[row] : ends[row]]
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("proposer", [Proposer.NONE, Proposer.NGRAM])
def test_greedy_texts_are_transformers(pair: tuple[Any, Path], proposer: Proposer) -> None:
    theirs, folder = pair
    prompts = [row[:n].tolist() for row, n in zip(tokens(3, 45), (2, 17, 45), strict=True)]
    expected = [
        theirs.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long),
            do_sample=False, max_new_tokens=64, eos_token_id=None,
        )[0, len(p) :].tolist()
        for p in prompts
    ]  # fmt: skip
    config = EngineConfig(token_budget=20, block_tokens=4, target_blocks=128, context_tokens=256)
    backend = TorchBackend(ours(folder), None, config)
    engine = Engine(backend, LocalPlanner(AnyPlan((proposer,), 4, fixed_k=True)), config)
    requests = [engine.add(p, SamplingParams(max_tokens=64)) for p in prompts]
    while engine.has_work:
        engine.step()
    assert [r.output for r in requests] == expected


@torch.inference_mode()
def test_bfloat16_rounds_as_transformers_does(pair: tuple[Any, Path]) -> None:
    theirs, folder = pair
    ids = tokens(1, 40)
    exact = theirs(ids).logits[0]
    rough = type(theirs).from_pretrained(folder, dtype=torch.bfloat16).eval()
    model = ours(folder, torch.bfloat16)
    torch.testing.assert_close(model.embed(ids[0]), rough.get_input_embeddings()(ids[0]))
    hidden = Runner(model, 10, 4).read(ids.tolist(), Spans([range(10)], [0], [40]))
    allowed, error = (
        (logits.float() - exact).square().mean().sqrt()
        for logits in (rough(ids).logits[0], model.logits(hidden))
    )
    assert error <= 1.4 * allowed  # over eight models .83 to 1.33, 1.01 on average


@torch.inference_mode()
def test_a_checkpoint_serves_as_a_draft_too(pair: tuple[Any, Path]) -> None:
    _, folder = pair
    config = EngineConfig(token_budget=20, target_blocks=16, draft_blocks=16, context_tokens=128)
    draft = DraftModel(ours(folder), torch.arange(VOCAB))
    backend = TorchBackend(ours(folder), draft, config)
    engine = Engine(
        backend, LocalPlanner(AnyPlan((Proposer.DRAFT_MODEL,), 3, fixed_k=True)), config
    )
    request = engine.add(tokens(1, 30)[0].tolist(), SamplingParams(max_tokens=24))
    outcomes = []
    while engine.has_work:
        outcomes.append(engine.step())
    drafted = [o for o in outcomes if o is not None and o.proposer[0] == Proposer.DRAFT_MODEL]
    assert len(request.output) == 24
    assert all(int(o.accepted[0]) == int(o.verified_k[0]) for o in drafted), "it is its own draft"


@torch.inference_mode()
def test_a_tree_has_the_logits_of_its_paths(pair: tuple[Any, Path]) -> None:
    theirs, folder = pair
    ids = tokens(1, 30)[0].tolist()
    nodes, parents = [4, 5, 6, 7, 8, 9], [-1, -1, 0, 1, 2, 4]
    paths = [[0], [1], [0, 2], [1, 3], [0, 2, 4], [0, 2, 4, 5]]
    runner, table = Runner(ours(folder), 16, 4), [list(range(16))]
    runner.read([ids], Spans(table, [0], [30]))
    hidden = runner.read([nodes], Spans(table, [30], [6], trees_of([nodes], [parents])))
    for logits, path in zip(runner.model.logits(hidden), paths, strict=True):
        wanted = theirs(torch.tensor([ids + [nodes[n] for n in path]])).logits[0, -1]
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_window_gathers_no_blocks_behind_it() -> None:
    config = from_hf({"architectures": ["Qwen2ForCausalLM"]} | SIZES)
    cache = PagedKV(config, 32, 4, torch.float32, CPU)
    table, window = list(range(32)), 9
    (group,) = plan_ragged(cache, Spans([table], [100], [2]), 2, window).groups
    # Position 100 sees 92..100, position 101 sees 93..101; block 23 begins at 92.
    assert group.blocks[:3].tolist() == [23, 24, 25]
    seen = group.mask[0].view(2, 2, 12)[0] == 0.0
    assert seen.int().argmax(1).tolist() == [0, 1]
    assert seen.sum(1).tolist() == [9, 9]


def test_kernels_refuse_what_they_do_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load", lambda: object())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64}
    for name, fits in (("Llama", True), ("Qwen2", False), ("Qwen3", False), ("Gemma3", False)):
        config = from_hf({"architectures": [f"{name}ForCausalLM"]} | sizes)
        assert native.fits(config, torch.bfloat16, CPU) is fits


def test_distilling_refuses_what_it_cannot_teach(pair: tuple[Any, Path]) -> None:
    config, weights = load_checkpoint(pair[1])
    for make in (
        lambda: target_of(config, weights, torch.float32),
        lambda: Decoder(config, weights, 16),
    ):
        with pytest.raises(ValueError, match="distill works with Llama targets only"):
            make()


def read(name: str, **changes: Any) -> ModelConfig:
    config = {"architectures": [f"{name}ForCausalLM"]} | SIZES | changes
    return from_hf({k: v for k, v in config.items() if v is not ...})


def test_configs_of_transformers_before_version_5() -> None:
    gemma = read(
        "Gemma3", num_hidden_layers=13, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None,
        sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256, head_dim=256,
    )  # fmt: skip
    local = gemma.traits.local
    assert local is not None
    assert [i for i, near in enumerate(local.layers) if not near] == [5, 11]
    assert (gemma.rope_theta, local.rope_theta, local.window) == (1e6, 1e4, 512)
    assert (gemma.tied, gemma.traits.query_scale) == (True, 1.0)
    assert read("Gemma3").rope_theta == 1e6
    qwen = read("Qwen2", sliding_window=64, max_window_layers=1, use_sliding_window=False)
    assert (qwen.traits.local, qwen.tied) == (None, False)
    qwen = read("Qwen2", sliding_window=64, max_window_layers=1, use_sliding_window=True)
    assert qwen.traits.local == Local((False, True, True), 64, 10000.0)
    assert read("Qwen2", use_sliding_window=True, sliding_window=64).traits.local is None
    assert read("Llama").traits == LLAMA


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("Qwen3Moe", {}, "Qwen3MoeForCausalLM is not supported; supported: Llama.*, Gemma3"),
        ("Gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text only"),
        ("Qwen2", {"quantization_config": {"bits": 4}}, "quantization_config set is not supported"),
        ("Qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("Qwen3", {"attention_bias": True}, "attention_bias True is not supported"),
        ("Qwen2", {"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' is not supported; only"),
        ("Qwen2", {"layer_types": KINDS}, "sliding_attention, but use_sliding_window is off"),
        ("Qwen2", {"layer_types": ["full_attention", "linear"]}, "layer_types must list"),
        ("Gemma3", {"layer_types": KINDS[:2]}, "2 layer_types .* do not fit 3 layers"),
        ("Gemma3", {"sliding_window": 0}, "sliding_window of 0 do not fit"),
        ("Gemma3", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not support"),
        ("Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supp"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("Gemma3", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a number above 0"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "must tell full_attention and slid"),
        ("Gemma3", {"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear'"),
    ],
)
def test_names_what_is_not_supported(name: str, changes: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as raised:
        read(name, **changes)
    assert "\n" not in str(raised.value)


def test_a_list_of_end_tokens_ends_texts(pair: tuple[Any, Path]) -> None:
    file = pair[1] / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({"eos_token_id": [2, 7]}))
    try:
        assert load_config(pair[1]).eos_ids == (2, 7)
    finally:
        file.write_text(before)
