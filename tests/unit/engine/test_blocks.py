"""Block accounting: nothing leaks and nothing is shared, whatever is accepted or preempted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parlay.engine.kv_cache import BlockCache
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.policy import EngineLimits, Stateless, make_policy
from parlay.policies.types import BatchView, Plan, Proposer

TASK = Task({Proposer.NGRAM: (0.6, 0.8), Proposer.DRAFT_MODEL: (0.5, 0.6)}, match_rate=0.7)


class RandomPolicy(Stateless):
    """Any proposer, any k, every step and request anew."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def decide(self, view: BatchView) -> Plan:
        rows = len(view)
        return Plan(
            request_id=view.request_id,
            proposer=self.rng.integers(0, 3, rows).astype(np.uint8),
            k=self.rng.integers(0, 10, rows).astype(np.int16),
            shadow=np.zeros(rows, bool),
            propensity=np.ones(rows, np.float32),
            reason=np.zeros(rows, np.uint8),
            step_id=view.step_id,
        )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_sequence_keeps_every_block_owned_once(moves: list[tuple[int, int, bool]]) -> None:
    cache = BlockCache(12, 4)
    for request, tokens, grow in moves:
        held = cache.capacity(request)
        if grow:
            free, fits = cache.free, tokens <= cache.room(request)
            assert cache.reserve(request, tokens) is fits
            assert cache.capacity(request) >= tokens if fits else cache.free == free
        else:
            cache.truncate(request, tokens)
            assert cache.capacity(request) == min(held, cache.blocks_for(tokens) * 4)
        cache.check()
    for request in range(6):
        cache.release(request)
    assert cache.free == 12


def play(engine: Engine, steps: int, seed: int) -> int:
    """Run `steps` steps with requests arriving, ending and being aborted at random."""
    rng, preempted = np.random.default_rng(seed), 0
    live: list[Request] = []
    for _ in range(steps):
        if len(live) < 10 and rng.random() < 0.5:
            sampling = SamplingParams(max_tokens=int(rng.integers(1, 60)))
            prompt = list(range(1, int(rng.integers(2, 90))))
            speculation = SpeculationParams(task="t", max_k=int(rng.integers(0, 12)))
            live.append(engine.add(prompt, sampling, speculation))
        if live and rng.random() < 0.02:
            engine.abort(live[int(rng.integers(len(live)))])
        engine.step()
        engine.scheduler.target.check()
        engine.scheduler.draft.check()
        for request in live:
            table = engine.scheduler.target.capacity(request.request_id)
            assert (request.computed <= table) if not request.finished else table == 0
        preempted += sum(r.preemptions for r in live if r.finished)
        live = [r for r in live if not r.finished]
    while engine.has_work:
        engine.step()
    return preempted


def test_ten_thousand_random_steps_leak_and_share_nothing() -> None:
    config = EngineConfig(
        max_running=8, token_budget=48, block_tokens=4, target_blocks=60, draft_blocks=40,
        draft_window_tokens=24,
    )  # fmt: skip
    backend = VirtualBackend(Hazards({"t": TASK}), engine=EngineLimits(0b0111, 12, (), 48))
    engine = Engine(backend, LocalPlanner(RandomPolicy(1)), config)
    preempted = play(engine, 10_000, seed=2)
    assert preempted > 20
    assert engine.scheduler.target.free == 60
    assert engine.scheduler.draft.free == 40


@pytest.mark.parametrize("blocks", [8, 12, 400])
def test_output_is_the_same_with_and_without_pressure(blocks: int) -> None:
    def outputs(target_blocks: int, seed: int) -> list[list[int]]:
        config = EngineConfig(block_tokens=8, target_blocks=target_blocks, token_budget=32)
        backend = VirtualBackend(Hazards({"t": TASK}), engine=EngineLimits(0b0111, 8, (), 32))
        engine = Engine(backend, LocalPlanner(RandomPolicy(seed)), config)
        requests = [
            engine.add(
                list(range(1, 20 + i)), SamplingParams(max_tokens=20), SpeculationParams(task="t")
            )
            for i in range(6)
        ]
        while engine.has_work:
            engine.step()
        return [r.output for r in requests]

    assert outputs(blocks, 3) == outputs(1000, 4)


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockCache(0, 16)


def test_a_prompt_that_does_not_fit_waits_instead_of_being_computed_again_and_again() -> None:
    config = EngineConfig(block_tokens=16, target_blocks=20, token_budget=64)
    backend = VirtualBackend(Hazards({"t": TASK}), engine=EngineLimits(0b0111, 8, (), 64))
    engine = Engine(backend, LocalPlanner(RandomPolicy(1)), config)
    task = SpeculationParams(task="t")
    first = engine.add(list(range(100)), SamplingParams(max_tokens=150), task)
    second = engine.add(list(range(200, 400)), SamplingParams(max_tokens=20), task)
    computed = 0
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        computed += outcome.prefill_tokens
    assert computed == 300
    assert (first.preemptions, second.preemptions) == (0, 0)


def test_a_row_that_cannot_draft_takes_no_draft_block_from_one_that_can() -> None:
    config = EngineConfig(block_tokens=4, draft_blocks=1)
    backend = VirtualBackend(Hazards({"t": TASK}), engine=EngineLimits(0b0111, 8))
    policy = make_policy("fixed", {"proposer": "draft_model", "k": 2}, backend.limits())
    engine = Engine(backend, LocalPlanner(policy), config)
    for prompt in ([1, 2, 3], [1, 2]):
        engine.add(prompt, SamplingParams(max_tokens=20), SpeculationParams(task="t"))
    engine.step()
    outcome = engine.step()
    assert outcome is not None
    assert outcome.drafted_k.tolist() == [0, 1]
