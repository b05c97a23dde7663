"""TETRIS: within the capacity, the tokens that a greedy heap over the batch would take."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS
from tests.unit.policies.test_allocate import view_of

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams, SpeculationParams
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits, make_policy
from parlay.policies.types import Array, Proposer


def by_heap(own: Array, drafted: Array, capacity_tokens: int) -> list[int]:
    """Take, again and again, the likeliest next token of any row, as the source does."""
    taken = [0] * len(own)
    heap = [(-own[row, 0], row) for row in range(len(own)) if drafted[row]]
    heapq.heapify(heap)
    for _ in range(min(capacity_tokens, int(drafted.sum()))):
        minus_reached, row = heapq.heappop(heap)
        taken[row] += 1
        if taken[row] < drafted[row]:
            heapq.heappush(heap, (minus_reached * own[row, taken[row]], row))
    return taken


def test_a_full_step_verifies_what_the_heap_takes() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows, capacity_tokens = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        settings = {"k": 4, "capacity_tokens": capacity_tokens}
        view = view_of(list(range(rows)))
        plan = make_policy("tetris", settings, LIMITS).decide(view)
        drafted = rng.integers(0, 5, rows).astype(np.int32)
        own = rng.uniform(0.05, 0.95, (rows, 4))
        verify_k = fit_plan(plan, view, drafted, own).verify_k
        assert verify_k.tolist() == by_heap(own, drafted, capacity_tokens), seed


def test_the_engine_drafts_all_and_verifies_what_fits() -> None:
    limits = EngineLimits(0b0101, 8)
    planner = LocalPlanner(make_policy("tetris", {"k": 4, "capacity_tokens": 6}, limits))
    task = Task({Proposer.DRAFT_MODEL: (0.7,)}, match_rate=0.0)
    engine = Engine(VirtualBackend(Hazards({"chat": task}), engine=limits), planner)
    for _ in range(4):
        engine.add([1] * 5, SamplingParams(max_tokens=60), SpeculationParams(task="chat"))
    full = 0
    for _ in range(8):
        outcome = engine.step()
        assert outcome is not None
        assert outcome.verified_k.sum() <= 6
        full += bool(outcome.drafted_k.sum() == 16 and outcome.verified_k.sum() == 6)
    assert full >= 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"k": 0}, "k must be between 1 and 64, not 0"),
        ({"capacity_tokens": 0}, "capacity_tokens must be between 1 and 65536, not 0"),
        ({"capacity_tokens": "many"}, "should be of type int"),
    ],
)
def test_bad_settings_get_one_clear_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy("tetris", settings, LIMITS)
