from __future__ import annotations

import logging
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.tiny import AnyPlan

from parlay.engine.planner import LocalPlanner
from parlay.engine.plugins import sglang
from parlay.engine.plugins.adapter import Adapter
from parlay.engine.plugins.sglang_steps import BatchSteps, StepPrice, nearest
from parlay.policies.policy import EngineLimits, make_policy
from parlay.policies.types import DRAFT_MODEL, Proposer, StepOutcome

STEPS = (0, 1, 3, 7)
LIMITS = EngineLimits(1 | 1 << DRAFT_MODEL, 7, token_budget=4096)


class Spy(AnyPlan):
    """Plans one k for everybody; keeps what it is told."""

    def __init__(self, k: int = 3) -> None:
        super().__init__((Proposer.DRAFT_MODEL,), k, fixed_k=True)
        self.heard: list[StepOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)


class Clock:
    def __init__(self, step_s: float = 0.01) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


class SGLangsOwn:
    """The methods of SGLang's policy that we stand on; it always says 1."""

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        self.candidate_steps = list(STEPS)
        self.heard: list[tuple[list[int], int]] = []
        self.graphs: list[int] | None = None

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self.graphs = cuda_graph_bs

    def get_steps_for_batch(self, batch_size: int) -> int:
        return 1

    def on_verify_complete(
        self, accepted: list[int], batch_size: int, num_steps: int | None = None
    ) -> int | None:
        self.heard.append((accepted, batch_size))
        return None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        if self.graphs is None:
            return None
        return [size for size in self.graphs if step < 7 or size <= 2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARLAY_POLICY", "PARLAY_SET", "PARLAY_SIDECAR", "PARLAY_SGLANG_STEP"):
        monkeypatch.delenv(name, raising=False)


def decider(spy: Any, clock: Any = None) -> BatchSteps:
    return BatchSteps(Adapter("sglang", LIMITS, planner=LocalPlanner(spy)), clock)


def steered(spy: Any = None, alone: bool = True) -> Any:
    kind: Any = sglang.steered(SGLangsOwn)
    params = kind(3)
    if spy is not None:
        params.parlay = decider(spy, Clock() if alone else None)
    return params


@pytest.mark.parametrize(
    ("mean", "expected"), [(0.0, 0), (0.4, 0), (0.6, 1), (2.0, 1), (2.1, 3), (5.0, 3), (9.0, 7)]
)
def test_the_nearest_step_is_taken(mean: float, expected: int) -> None:
    assert nearest(np.asarray([mean]), STEPS) == expected


def test_a_step_is_told_with_what_was_decided_for_it() -> None:
    spy = Spy(3)
    steps = decider(spy, Clock())
    for held in ([3, 1, 0], [2, 2, 3], [0, 0, 1]):
        assert steps.steps(3, STEPS) == 3
        steps.verified(held, 3)
    # Of the first step nobody knows when it began.
    first, second = spy.heard
    assert (first.accepted.tolist(), first.emitted.tolist()) == ([2, 2, 3], [3, 3, 4])
    assert second.accepted.tolist() == [0, 0, 1]
    assert second.drafted_k.tolist() == second.requested_k.tolist() == [3, 3, 3]
    assert (second.proposer == DRAFT_MODEL).all()
    assert (second.padded_tokens, second.draft_depth) == (12, 3)
    assert second.step_ms == pytest.approx(10.0)
    assert second.verify_ms + second.draft_ms.sum() == pytest.approx(10.0, rel=1e-4)


def test_overlapping_steps_are_told_in_their_order() -> None:
    spy = Spy(1)
    steps = decider(spy)
    steps.steps(2, STEPS)
    spy.k_max = 3
    steps.steps(2, STEPS)
    steps.verified([1, 1], 2)
    steps.steps(2, STEPS)
    steps.verified([3, 0], 2)
    assert [o.drafted_k.tolist() for o in spy.heard] == [[1, 1], [3, 3]]


def test_what_sglang_says_was_drafted_counts() -> None:
    spy = Spy(1)
    steps = decider(spy)
    steps.steps(2, STEPS)
    steps.verified([5, 7], 2, drafted=7)
    assert spy.heard[0].drafted_k.tolist() == [7, 7]
    assert spy.heard[0].accepted.tolist() == [5, 7]


def test_a_batch_that_changed_or_idled_is_no_measure_of_a_step() -> None:
    spy, clock = Spy(), Clock()
    steps = decider(spy, clock)
    for _ in range(5):
        steps.steps(2, STEPS)
        steps.verified([1, 1], 2)
    clock.now += 9.0
    steps.steps(2, STEPS)
    steps.verified([1, 1], 2)
    steps.steps(1, STEPS)
    steps.verified([1], 1)
    assert len(spy.heard) == 4
    assert all(o.step_ms == pytest.approx(10.0) for o in spy.heard)
    steps.steps(1, STEPS)
    steps.verified([1], 1)
    assert len(spy.heard) == 5


def test_an_engine_that_became_slow_is_measured_again() -> None:
    spy, clock = Spy(), Clock()
    steps = decider(spy, clock)
    for at in range(60):
        clock.step_s = 0.01 if at < 5 else 0.1
        steps.steps(2, STEPS)
        steps.verified([1, 1], 2)
    assert spy.heard[-1].step_ms == pytest.approx(100.0)


def test_results_of_nothing_that_was_asked_are_left_alone() -> None:
    spy = Spy()
    steps = decider(spy)
    steps.verified([1, 2], 2)
    steps.steps(3, STEPS)
    steps.verified([1, 2], 2)
    assert spy.heard == []


def history(steps: BatchSteps, seed: int = 0, count: int = 150) -> list[int]:
    """Let batches of 1 to 6 requests draft, whose tokens hold with a chance of .8."""
    rng, taken = np.random.default_rng(seed), []
    for at in range(count):
        rows = 1 + at // 10 % 6
        taken.append(steps.steps(rows, STEPS))
        held = (rng.random((rows, taken[-1])) < 0.8).cumprod(axis=1).sum(axis=1)
        steps.verified(held.tolist(), rows)
    return taken


def test_ranks_decide_alike_and_draft_where_it_pays() -> None:
    def rank(price: StepPrice) -> list[int]:
        adapter = Adapter(
            "sglang", LIMITS, planner=LocalPlanner(make_policy("goodput", {}, LIMITS))
        )
        return history(BatchSteps(adapter, None, price))

    one, other = rank(StepPrice()), rank(StepPrice())
    assert one == other
    assert len(set(one)) > 1
    assert np.mean(one[-60:]) > 2
    # Where every token takes as long as a step of its own, nothing pays.
    assert np.mean(rank(StepPrice(1.0, 1.0, 1.0))[-60:]) < 0.5


def test_steps_without_a_graph_are_not_taken() -> None:
    params = steered(Spy(7))
    params.set_cuda_graph_bs([1, 2, 4, 8])
    assert params.graphs == [1, 2, 4, 8]
    assert params.get_steps_for_batch(2) == 7
    assert params.get_steps_for_batch(3) == 3
    params.set_cuda_graph_bs(None)
    assert params.get_steps_for_batch(3) == 7


def test_sglangs_results_reach_the_policy_and_name_no_step() -> None:
    spy = Spy(3)
    params = steered(spy)
    for _ in range(3):
        assert params.get_steps_for_batch(2) == 3
        assert params.on_verify_complete([2, 1], 2) is None
    assert [o.accepted.tolist() for o in spy.heard] == [[2, 1], [2, 1]]
    assert params.heard == []


def test_where_we_fail_sglangs_own_rule_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    params = steered(Spy(3))
    params.parlay.steps = lambda *args: 1 / 0
    with caplog.at_level(logging.INFO, "sglang.parlay"):
        assert params.get_steps_for_batch(2) == 1
        params.on_verify_complete([1, 1], 2)
    assert params.parlay is None
    assert params.heard == [([1, 1], 2)]
    assert caplog.text.count("parlay stops steering") == 1


def test_says_what_it_steers_and_believes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sglang.parlay"):
        assert steered().parlay.clock is not None
        monkeypatch.setattr(sglang, "ranks", lambda: 2)
        monkeypatch.setenv("PARLAY_SGLANG_STEP", "5,0.1,1")
        assert steered().parlay.price == StepPrice(5.0, 0.1, 1.0)
        assert steered().parlay.clock is None
        monkeypatch.setenv("PARLAY_SGLANG_STEP", "5,0.1")
        assert steered().parlay is None
        monkeypatch.setenv("PARLAY_SGLANG_STEP", "0,0.1,1")
        assert steered().parlay is None
        monkeypatch.delenv("PARLAY_SGLANG_STEP")
        monkeypatch.setenv("PARLAY_SIDECAR", "unix:/tmp/nobody.sock")
        assert steered().parlay is None
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "parlay steers adaptive speculation: 0, 1, 3, 7 steps, step times measured"
    assert "PARLAY_SGLANG_STEP has it" in said[1]
    assert "'5,0.1'" in said[3]
    assert "above 0" in said[4]
    assert "unset PARLAY_SIDECAR" in said[5]


def test_one_rank_where_nothing_is_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    def torch(ready: bool) -> Any:
        of = {"is_available": lambda: True, "is_initialized": lambda: ready}
        return SimpleNamespace(distributed=SimpleNamespace(**of, get_world_size=lambda: 4))

    monkeypatch.setitem(sys.modules, "torch", torch(False))
    assert sglang.ranks() == 1
    monkeypatch.setitem(sys.modules, "torch", torch(True))
    assert sglang.ranks() == 4
    monkeypatch.delitem(sys.modules, "torch")
    assert sglang.ranks() == 1


def test_registers_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kind(Enum):
        REPLACE = "replace"

    taken: list[tuple[str, Any, Any]] = []
    registry = SimpleNamespace(register=lambda *given: taken.append(given))
    path, _, name = sglang.TARGET.rpartition(".")
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(**{name: SGLangsOwn}))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=Kind)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.delenv("PARLAY", raising=False)
    sglang.register()
    assert not taken
    monkeypatch.setenv("PARLAY", "1")
    sglang.register()
    ((target, kind, how),) = taken
    assert (target, how) == (sglang.TARGET, Kind.REPLACE)
    assert issubclass(kind, SGLangsOwn)
    assert kind is sglang.steered(SGLangsOwn)


def test_sizes_of_graphs_may_end_before_a_batch() -> None:
    params = SGLangsOwn(1)
    params.set_cuda_graph_bs([1, 2, 4])
    assert sglang.lengths_for(params, 9, [1, 2, 4]) == [0, 1, 3]
