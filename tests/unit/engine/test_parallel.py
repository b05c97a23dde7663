"""Ranks that share a model add up to it; the ranks are threads here, processes elsewhere."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import CPU, INTERPRETED, tiny_config, tiny_weights
from torch import Tensor

from parlay.engine.generate import Placement
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.parallel import (
    Shard,
    Sum,
    check_degree,
    make_shard,
    shard_config,
    shard_weights,
)
from parlay.engine.parallel_group import rank_device
from parlay.engine.parallel_model import load_parallel
from parlay.engine.parallel_team import Team, open_team
from parlay.engine.runner import Runner
from parlay.engine.spans import Spans
from parlay.engine.traits import LLAMA, Local, Traits
from parlay.engine.tree import trees_of

VOCAB, SIZE = 29, 4
TRAITS = {
    "llama": LLAMA,
    "qwen2": Traits(qkv_bias=True),
    "qwen3": Traits(qk_norm=True),
    "gemma3": Traits(
        qk_norm=True,
        query_scale=0.7,
        post_norms=True,
        norm_plus_one=True,
        gelu=True,
        scaled_embedding=True,
        local=Local((True, False), 5, 100.0),
    ),
}


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads that stand for ranks into Triton's interpreter one at a time: it has globals."""
    if not INTERPRETED:
        return
    from parlay.engine.attention.triton import TritonAttention

    call, lock = TritonAttention.__call__, threading.Lock()

    def locked(self: TritonAttention, *args: Any) -> Tensor:
        with lock:
            return call(self, *args)

    monkeypatch.setattr(TritonAttention, "__call__", locked)


class Meeting:
    """Where threads that stand for ranks add up what they have."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=20.0)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def total(self, rank: int) -> Sum:
        def add(x: Tensor) -> Tensor:
            self.brought[rank] = x
            self.barrier.wait()
            whole = torch.stack(self.brought).sum(0)
            self.barrier.wait()
            return whole

        return add

    def run(self, work: Callable[[int, Sum], list[Tensor]]) -> list[list[Tensor]]:
        """Return what each rank made; one that fails lets the others fail too."""

        def one(rank: int) -> list[Tensor]:
            try:
                with torch.inference_mode():
                    return work(rank, self.total(rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


def config_of(traits: Traits, heads: int = 6, kv_heads: int = 3, tied: bool = False) -> ModelConfig:
    return dataclasses.replace(
        tiny_config(VOCAB, 2), heads=heads, kv_heads=kv_heads, ffn=23, traits=traits, tied=tied
    )


def weights_of(config: ModelConfig, seed: int = 3) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weights = tiny_weights(config.tensor_shapes(), rng)
    drawn = {n: torch.randn(w.shape, generator=rng) * 0.3 for n, w in weights.items() if w.ndim < 2}
    return weights | drawn


def read(model: Llama) -> list[Tensor]:
    """Return states and taps of a batch of prompts, of a step behind it, and of a tree."""
    runner = Runner(model, 40, SIZE, taps=(1, 2))
    rng, tables = np.random.default_rng(1), [[7, 3, 9, 1, 12], [0, 4, 8, 2, 6]]
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (9, 5)]
    found = [runner.read(prompts, Spans(tables, [0, 0], [9, 5]))]
    found.append(runner.read([[5], [3, 2]], Spans(tables, [9, 5], [1, 2])))
    trees = trees_of([[4, 5, 6], [7, 8]], [[-1, -1, 1], [-1, 0]])
    found.append(runner.read([[4, 5, 6], [7, 8]], Spans(tables, [10, 7], [3, 2], trees)))
    found.append(runner.states_before(Spans(tables, [0, 0], [9, 7]), [9, 7]))
    return [*found, *(model.logits(hidden) for hidden in found[:3])]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", TRAITS)
def test_ranks_add_up_to_the_model(family: str, size: int) -> None:
    config = config_of(TRAITS[family], tied=family == "gemma3")
    weights = weights_of(config)
    embedding = weights["model.embed_tokens.weight"]
    with torch.inference_mode():
        whole = read(Llama(config, weights, embedding, torch.float32, CPU))

    def work(rank: int, total: Sum) -> list[Tensor]:
        shard = Shard(rank, size)
        own = dict(shard_weights(config, weights, embedding, shard))
        assert shard_config(config, shard).kv_heads < config.kv_heads or size == 1
        # Every rank reads the input here; in processes rank 0's is shared.
        part = make_shard(shard_config(config, shard), own, embedding, torch.float32, CPU, total)
        return read(part)

    parts = Meeting(size).run(work)
    for at, expected in enumerate(whole):
        made = [p[at] for p in parts]
        if at >= 4:
            torch.testing.assert_close(torch.cat(made, 1), expected, rtol=1e-4, atol=1e-5)
        for states in made if at < 4 else ():
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("invariant", [False, True])
def test_bfloat16_ranks_are_as_near_to_float32_as_the_model_is(invariant: bool) -> None:
    config = dataclasses.replace(config_of(LLAMA), hidden=64, ffn=96, head_dim=16)
    weights = weights_of(config)
    embedding = weights["model.embed_tokens.weight"]
    with torch.inference_mode():
        exact = torch.cat(read(Llama(config, weights, embedding, torch.float32, CPU))[4:])
        alone = read(Llama(config, weights, embedding, torch.bfloat16, CPU, invariant))[4:]

    def work(rank: int, total: Sum) -> list[Tensor]:
        shard = Shard(rank, 2)
        own = dict(shard_weights(config, weights, embedding, shard))
        part = make_shard(
            shard_config(config, shard), own, embedding, torch.bfloat16, CPU, total, invariant
        )
        return read(part)[4:]

    parts = Meeting(2).run(work)
    together = torch.cat([torch.cat(both, 1) for both in zip(*parts, strict=True)])
    noise = (torch.cat(alone).float() - exact).square().mean().sqrt()
    assert 0.0 < (together.float() - exact).square().mean().sqrt() < 2.0 * noise


@given(total=st.integers(0, 200), size=st.integers(1, 9))
def test_parts_are_everything_once_and_alike_in_size(total: int, size: int) -> None:
    parts = [range(total)[Shard(rank, size).part(total)] for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(total))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes)


@given(kv_heads=st.integers(1, 6), share=st.integers(1, 3), data=st.data())
def test_every_weight_is_somewhere_once(kv_heads: int, share: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, kv_heads))
    config = config_of(TRAITS["qwen2"], share * kv_heads, kv_heads)
    weights = weights_of(config)
    embedding = weights["model.embed_tokens.weight"]
    parts = [
        dict(shard_weights(config, weights, embedding, Shard(rank, size))) for rank in range(size)
    ]
    for name, weight in weights.items():
        made = [part[name] for part in parts if name in part]
        if name == "model.embed_tokens.weight" or "norm" in name:
            assert all(torch.equal(m, weight) for m in made)
            assert len(made) == (size if "norm" in name else 1)
        else:
            assert torch.equal(
                torch.cat(made, int("o_proj" in name or "down_proj" in name)), weight
            )


def test_degrees_that_cannot_be_are_one_line() -> None:
    config = config_of(LLAMA)
    for size in (0, 4):
        with pytest.raises(ValueError, match=f"tensor_parallel {size}: .* has 3; take 1 to 3"):
            check_degree("tensor_parallel", config, size)
    check_degree("tensor_parallel", config, 3)
    with pytest.raises(ValueError, match="draft_tensor_parallel must be at least 1, not 0"):
        Team(2, 0)
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1, not -2"):
        Team(-2)


def test_gpus_that_are_not_there_are_one_line() -> None:
    config = config_of(LLAMA)
    weights = weights_of(config)
    team = Team(1)
    team.degrees = (2, 1)
    gpus = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(ValueError, match=f"tensor_parallel 2 from {gpus} on needs cuda:"):
        load_parallel(team, 0, config, weights, weights["lm_head.weight"], torch.float32, gpus)
    team.close()


def test_a_rank_has_a_gpu_of_its_own() -> None:
    assert rank_device(CPU, 3) == CPU
    assert rank_device(torch.device("cuda"), 0) == torch.device("cuda:0")
    assert rank_device(torch.device("cuda:2"), 1) == torch.device("cuda:3")


def test_one_rank_needs_no_team_and_says_nothing() -> None:
    with open_team(1, 1) as team:
        assert team is None
    assert str(Placement()) == ""
    assert str(Placement(tensor_parallel=4)) == "tensor parallel: target 4, draft 1"
