"""Reports that say nothing new stay home; what they would have taught goes with the next one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from parlay.engine.quiet import QUIET_STEPS, Quiet
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import History
from parlay.policies.types import BatchView, Plan, Proposer, ShadowRows, StepOutcome


def shadow(request_id: int) -> ShadowRows:
    return ShadowRows(
        request_id=np.array([request_id], np.uint64), proposer=np.array([1], np.uint8),
        offered_k=np.array([3], np.int16), matched=np.array([2.0], np.float32),
        observed=np.array([3], np.int16), match_tokens=np.array([4], np.int32),
        kind=np.array([0], np.uint8),
    )  # fmt: skip


def calm() -> tuple[StepOutcome, BatchView, Plan]:
    """Return a step in which nothing was drafted, the next one's view, and a plan to draft none."""
    history = History(3)
    plan = make_policy("none").decide(history.view())
    outcome = dataclasses.replace(history.step(plan), prefill_tokens=0, shadow=shadow(1))
    view = history.view()
    view.prefill_tokens[:] = 0
    return outcome, view, plan


def at(view: BatchView, step_id: int) -> BatchView:
    return dataclasses.replace(view, step_id=step_id)


def test_one_report_in_a_few_is_sent_and_carries_the_others_shadows() -> None:
    outcome, view, plan = calm()
    quiet, sent = Quiet(), {}
    for step in range(10):
        if not quiet.holds(outcome, at(view, step), plan):
            found = quiet.sent(outcome, at(view, step))
            assert found is not None
            sent[step] = len(found.shadow)
    assert list(sent) == [0, QUIET_STEPS, 2 * QUIET_STEPS]
    assert list(sent.values()) == [1, QUIET_STEPS, QUIET_STEPS]


def drafts(outcome: StepOutcome, view: BatchView, plan: Plan) -> None:
    outcome.drafted_k[0] = 1


def plans_drafts(outcome: StepOutcome, view: BatchView, plan: Plan) -> None:
    plan.k[0], plan.proposer[0] = 2, Proposer.NGRAM


def reads_a_prompt(outcome: StepOutcome, view: BatchView, plan: Plan) -> None:
    view.prefill_tokens[0] = 7


def changes_the_batch(outcome: StepOutcome, view: BatchView, plan: Plan) -> None:
    view.request_id = view.request_id[1:]


@pytest.mark.parametrize("change", [drafts, plans_drafts, reads_a_prompt, changes_the_batch])
def test_what_says_something_is_sent_at_once(change: object) -> None:
    outcome, view, plan = calm()
    quiet = Quiet()
    quiet.sent(outcome, at(view, 0))
    assert quiet.holds(outcome, at(view, 1), plan)
    assert callable(change)
    change(outcome, view, plan)
    assert not quiet.holds(outcome, at(view, 2), plan)


def test_without_a_plan_or_an_outcome_everything_is_sent() -> None:
    outcome, view, plan = calm()
    quiet = Quiet()
    assert not quiet.holds(outcome, at(view, 0), plan)
    quiet.sent(outcome, at(view, 0))
    assert not quiet.holds(None, at(view, 1), plan)
    assert not quiet.holds(outcome, at(view, 1), None)
