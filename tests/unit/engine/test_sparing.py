from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.unit.policies.test_allocate import plan_of, view_of

from parlay.engine.sparing import MOST_STEPS, SparingPlanner
from parlay.policies.policy import Stateless
from parlay.policies.types import BatchView, Plan, Reason, StepOutcome


class Timed(Stateless):
    """Takes `ms` to decide by its own clock; says what it was told by then."""

    name = "timed"

    def __init__(self, ms: float) -> None:
        self.ms, self.now_s, self.asked = ms, 0.0, 0
        self.heard: list[int] = []
        self.broken = False
        self.reason, self.value_ms = int(Reason.BEST_GOODPUT), 5.0

    def __call__(self) -> float:
        return self.now_s

    def decide(self, view: BatchView) -> Plan:
        if self.broken:
            raise RuntimeError("no idea")
        self.asked += 1
        self.now_s += 1e-3 * self.ms
        rows = len(view)
        plan = plan_of(view.request_id.tolist(), [1] * rows, [2] * rows)
        return dataclasses.replace(
            plan,
            reason=np.full(rows, self.reason, np.uint8),
            token_value_ms=self.value_ms,
            step_id=view.step_id,
        )

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome.step_id)


def outcome(step_id: int, step_ms: float = 10.0, prompts: int = 0) -> StepOutcome:
    made = StepOutcome.__new__(StepOutcome)
    made.step_id, made.step_ms, made.prefill_tokens = step_id, step_ms, prompts
    return made


def run(policy: Timed, steps: int = 60, step_ms: float = 10.0, ids: int = 0) -> list[int]:
    """Return of which steps the plans were; ids: other requests come after so many steps."""
    planner, of = SparingPlanner(policy, policy), []
    for step in range(steps):
        view = view_of([1, 2] if not ids else [step // ids, 500])
        view.step_id = step
        plan, _ = planner.plan(view)
        assert plan is not None
        of.append(plan.step_id)
        planner.observe(outcome(step, step_ms))
    return of


@pytest.mark.parametrize(("ms", "every"), [(0.1, 1), (0.3, 2), (0.5, 3), (5.0, 4)])
def test_is_asked_so_often_that_it_takes_its_share(ms: float, every: int) -> None:
    policy = Timed(ms)
    of = run(policy)
    assert set(np.diff(sorted(set(of[8:]))).tolist()) == {every}
    assert every <= MOST_STEPS


def test_hears_of_every_step_in_order_before_it_decides() -> None:
    policy = Timed(0.3)
    of = run(policy)
    assert policy.heard == list(range(len(policy.heard)))
    assert len(policy.heard) == of[-1]


def test_another_batch_a_try_and_a_plan_without_prices_are_decided_at_once() -> None:
    policy = Timed(5.0)
    assert run(policy, 20, ids=1) == list(range(20))
    policy = Timed(5.0)
    policy.reason = int(Reason.EXPLORE)
    assert run(policy, 20) == list(range(20))
    policy = Timed(5.0)
    policy.value_ms = float("nan")
    assert run(policy, 20) == list(range(20))


def test_a_plan_serves_those_who_are_left_but_nobody_new() -> None:
    policy = Timed(5.0)
    planner = SparingPlanner(policy, policy)
    for ids, asked in (([1, 2, 3], 1), ([1, 2, 3], 1), ([3, 1], 1), ([3, 1, 4], 2), ([4, 5], 3)):
        planner.plan(view_of(ids))
        planner.observe(outcome(0))
        assert policy.asked == asked


def test_an_outcome_is_made_when_the_policy_is_told() -> None:
    policy, made = Timed(5.0), []

    def make() -> StepOutcome:
        made.append(len(policy.heard))
        return outcome(len(made))

    planner = SparingPlanner(policy, policy)
    planner.plan(view_of([1]))
    for _ in range(3):
        planner.observe_later(make, 10.0, 0)
    assert not made
    assert planner.every() == MOST_STEPS
    planner.plan(view_of([2]))
    assert policy.heard == [1, 2, 3]


def test_prompts_are_decided_for_at_once_and_measure_nothing() -> None:
    policy = Timed(5.0)
    planner = SparingPlanner(policy, policy)
    for step in range(12):
        planner.plan(view_of([1, 2], prefill_tokens=np.array([0, 7 * (step % 2)], np.int32)))
        planner.observe(outcome(step, prompts=1))
    assert planner.every() == 1
    planner.observe(outcome(12))
    assert planner.every() == MOST_STEPS
    before = policy.asked
    for _ in range(6):
        planner.plan(view_of([1, 2], prefill_tokens=np.array([0, 7], np.int32)))
    assert policy.asked == before + 6


def test_what_fails_is_forgotten_and_asked_again() -> None:
    policy = Timed(5.0)
    planner = SparingPlanner(policy, policy)
    planner.observe(outcome(0))
    policy.broken = True
    with pytest.raises(RuntimeError, match="no idea"):
        planner.plan(view_of([1]))
    policy.broken = False
    assert planner.plan(view_of([1]))[0] is not None
    assert policy.heard == [0]


def test_a_policy_that_raises_over_one_report_hears_of_the_others() -> None:
    class Choosy(Timed):
        def observe(self, outcome: StepOutcome) -> None:
            if outcome.step_id == 1:
                raise RuntimeError("not this one")
            super().observe(outcome)

    policy = Choosy(5.0)
    planner = SparingPlanner(policy, policy)
    for step in range(4):
        planner.observe(outcome(step))
    with pytest.raises(RuntimeError, match="not this one"):
        planner.plan(view_of([1]))
    planner.plan(view_of([1]))
    assert policy.heard == [0, 2, 3]


@pytest.mark.parametrize("step_ms", [float("nan"), float("inf"), 0.0, 1e-320])
def test_a_time_that_is_none_is_not_counted(step_ms: float) -> None:
    assert set(np.diff(run(Timed(0.3), step_ms=step_ms)).tolist()) == {1}


def test_a_plan_serves_again_unseen_as_often_as_with_a_view() -> None:
    policy = Timed(0.5)
    planner = SparingPlanner(policy, policy)
    assert planner.again() is None  # there is none yet
    unseen = 0
    for step in range(40):
        if (plan := planner.again()) is None:
            view = view_of([1, 2])
            view.step_id = step
            plan, _ = planner.plan(view)
        else:
            unseen += 1
        assert plan is not None
        planner.observe(outcome(step))
    assert policy.asked + unseen == 40
    assert policy.heard == list(range(40))[: len(policy.heard)]
    assert policy.asked == sum(step == of for step, of in enumerate(run(Timed(0.5), 40)))


def test_a_plan_that_tries_something_out_serves_no_unseen_step() -> None:
    policy = Timed(2.0)
    policy.reason = int(Reason.EXPLORE)
    planner = SparingPlanner(policy, policy)
    planner.plan(view_of([1]))
    planner.observe(outcome(0))
    assert planner.again() is None
