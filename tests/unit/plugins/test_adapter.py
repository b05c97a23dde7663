from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

from parlay.engine.planner import LocalPlanner
from parlay.engine.plugins.adapter import Adapter, Decision, Load, StepResult, view_of
from parlay.engine.plugins.settings import read_settings
from parlay.engine.request import SpeculationParams
from parlay.policies.policy import EngineLimits, Stateless
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    BatchView,
    Plan,
    PlanSource,
    StepOutcome,
    Truncated,
)

LIMITS = EngineLimits(proposer_mask=0b111, k_max=8)


class Always(Stateless):
    """Plans k of the n-gram for everybody, within a budget; keeps what it is told."""

    name = "always"

    def __init__(self, k: int = 5, budget_tokens: int = -1) -> None:
        self.k, self.budget_tokens = k, budget_tokens
        self.heard: list[StepOutcome] = []

    def decide(self, view: BatchView) -> Plan:
        rows = len(view)
        return Plan(
            view.request_id,
            np.full(rows, NGRAM, np.uint8),
            np.full(rows, self.k, np.int16),
            np.zeros(rows, bool),
            np.ones(rows, np.float32),
            np.zeros(rows, np.uint8),
            budget_tokens=self.budget_tokens,
            step_id=view.step_id,
        )

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)


class Broken(Always):
    def decide(self, view: BatchView) -> Plan:
        raise RuntimeError("no idea")

    def observe(self, outcome: StepOutcome) -> None:
        raise KeyError("what")


def adapter_with(policy: Always) -> Adapter:
    return Adapter("test", LIMITS, planner=LocalPlanner(policy))


def result(drafted: list[int], accepted: list[int]) -> StepResult:
    k, held = np.asarray(drafted), np.asarray(accepted)
    return StepResult(k, held, held + 1, verify_ms=9.0, step_ms=10.0)


def decide(adapter: Adapter, *match: int) -> Decision:
    rows = [adapter.add() for _ in match]
    for row, tokens in zip(rows, match, strict=True):
        row.match_tokens = tokens
    return adapter.decide(view_of(rows, LIMITS))


def test_needs_neither_torch_nor_grpc() -> None:
    code = "import sys, parlay.engine.plugins.adapter as a; from parlay.policies.policy import *;"
    code += "a.Adapter('x', EngineLimits()); assert not {'torch', 'grpc'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_plan_is_fitted_to_limits_room_opt_outs_and_prompts() -> None:
    adapter = adapter_with(Always(20))
    free, short, out, other, prompt, deep = (
        adapter.add(s)
        for s in (
            SpeculationParams(),
            SpeculationParams(),
            SpeculationParams(max_k=0),
            SpeculationParams(proposer_mask=1 << DRAFT_MODEL),
            SpeculationParams(),
            SpeculationParams(max_k=3),
        )
    )
    rows = [free, short, out, other, prompt, deep]
    for row in rows:
        row.match_tokens = 4
    short.room, prompt.prefill_tokens = 2, 30
    fit = adapter.decide(view_of(rows, LIMITS)).fit
    assert fit.k.tolist() == [8, 2, 0, 0, 0, 3]
    assert fit.proposer.tolist() == [NGRAM, NGRAM, 0, 0, 0, NGRAM]


def test_steps_are_numbered_and_outcomes_carry_what_was_decided() -> None:
    policy = Always()
    adapter = adapter_with(policy)
    first, second = decide(adapter, 3), decide(adapter, 3, 0)
    assert (first.view.step_id, second.view.step_id) == (0, 1)
    # Steps overlap in engines that schedule ahead.
    adapter.observe(first, result([5], [2]))
    done = result([4, 0], [1, 0])
    done.truncated_by = np.asarray([Truncated.EOS, Truncated.NONE])
    adapter.observe(second, done)
    one, two = policy.heard
    assert (one.step_id, one.requested_k.tolist(), one.accepted.tolist()) == (0, [5], [2])
    assert one.verified_k.tolist() == one.drafted_k.tolist() == [5]
    assert one.padded_tokens == 6
    assert two.proposer.tolist() == [NGRAM, 0]
    assert two.truncated_by.tolist() == [Truncated.EOS, Truncated.NONE]
    assert two.plan_step_id.tolist() == [1, 1]
    assert (two.plan_source == PlanSource.LOCAL).all()
    assert two.padded_tokens == 6


def test_a_request_remembers_and_is_forgotten() -> None:
    adapter = adapter_with(Always())
    row = adapter.add()
    row.match_tokens = 1
    adapter.observe(adapter.decide(view_of([row], LIMITS)), result([5], [4]))
    assert (row.steps, row.drafted, row.accepted) == (1, 5, 4)
    assert row.recent_accept == pytest.approx(1.4)
    decision = adapter.decide(view_of([row], LIMITS))
    assert decision.view.recent_accept[0] == pytest.approx(1.4)
    adapter.forget(row)
    adapter.forget(row)
    adapter.observe(decision, result([5], [0]))
    assert row.steps == 1


def test_the_plans_budget_cuts_what_is_verified() -> None:
    adapter = adapter_with(Always(4, budget_tokens=5))
    decision = decide(adapter, 2, 2)
    assert decision.fit.verify_k.sum() == 5
    drafted = np.asarray([4, 4], np.int32)
    assert adapter.verify_k(decision, drafted, None).sum() == 5
    assert adapter.verify_k(decision, np.zeros(2, np.int32), None).tolist() == [0, 0]


def test_a_policy_that_fails_costs_its_speculation_only(caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_with(Broken())
    with caplog.at_level(logging.WARNING, "parlay.plugin"):
        for _ in range(3):
            decision = decide(adapter, 5)
            assert (decision.fit.k == 0).all()
            adapter.observe(decision, result([0], [0]))
    assert adapter.counters.errors == 6
    assert adapter.counters.plans == {PlanSource.DEFAULT: 3}
    assert len(caplog.records) == 2
    assert "no idea" in caplog.text


def test_hints_that_make_no_sense_cost_nothing_but_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapter = adapter_with(Always())
    with caplog.at_level(logging.WARNING, "parlay.plugin"):
        rows = [adapter.add_hinted({"parlay_max_k": f"x{i}"}) for i in range(3)]
    assert [row.speculation.max_k for row in rows] == [64] * 3
    assert adapter.counters.fallbacks == {"hints left aside": 3}
    assert len(caplog.records) == 1
    assert adapter.add_hinted({"parlay_max_k": "2", "theirs": 1}).speculation.max_k == 2


def test_counters_tell_proposers_apart() -> None:
    adapter = adapter_with(Always())
    adapter.observe(decide(adapter, 3, 3, 0), result([5, 5, 0], [2, 0, 0]))
    counts = adapter.counters.as_dict()
    assert counts["drafted_tokens"] == {"ngram": 10, "draft_model": 0, "medusa": 0}
    assert counts["accepted_tokens"]["ngram"] == 2
    assert (counts["steps"], counts["emitted_tokens"]) == (1, 5)
    assert counts["plans"] == {"default": 0, "local": 1, "remote": 0}
    assert counts["inside_us"] >= counts["inside_most_us"] > 0


def test_a_view_tells_of_the_engine() -> None:
    adapter = adapter_with(Always())
    rows = [adapter.add(SpeculationParams(task="code", tpot_target_ms=20.0)), adapter.add()]
    rows[0].context_tokens, rows[1].context_tokens = 30, 12
    view = view_of(rows, LIMITS, Load(waiting=3, free_blocks=4, total_blocks=9))
    assert (view.running, view.waiting, view.free_blocks, view.total_blocks) == (2, 3, 4, 9)
    assert view.kv_tokens == 42
    assert view.task[0] != view.task[1] == 0
    assert view.tpot_target_ms[0] == 20.0
    assert view_of(rows, LIMITS, Load(kv_tokens=7)).kv_tokens == 7


def test_a_sidecar_that_is_not_there_leaves_the_local_policy() -> None:
    settings = read_settings("fixed", {"k": "2"}, "unix:/nowhere/parlay.sock", environ={})
    adapter = Adapter("test", LIMITS, settings)
    try:
        for _ in range(20):
            decision = decide(adapter, 3)
            assert decision.fit.k.tolist() == [2]
            adapter.observe(decision, result([2], [1]))
        assert adapter.counters.plans == {PlanSource.LOCAL: 20}
        assert adapter.counters.inside_us / 40 < 20_000
    finally:
        adapter.close()
