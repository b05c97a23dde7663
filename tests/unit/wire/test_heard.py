"""What the sidecar makes of what it hears: which plan a step followed, how likely it was."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.logged import assert_same

from parlay.controller import heard
from parlay.controller.heard import HeardStep, Waiting, heard_rows
from parlay.controller.host import Host
from parlay.policies.allocate import fit_plan
from parlay.policies.baselines.rows import rows_plan
from parlay.policies.log_schema import LoggedStep, steps_of
from parlay.policies.policy import make_policy, registry
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import DRAFT_MODEL, Plan, PlanSource, StepOutcome
from parlay.protos.codec import Hello, StepReport

REMOTE = PlanSource.REMOTE


def planned(history: History, k: int = 3, propensity: float = 0.25) -> Plan:
    view = history.view()
    rows = len(view)
    plan = rows_plan(view, np.full(rows, DRAFT_MODEL), np.full(rows, k))
    plan.propensity[:] = propensity
    plan.policy_version, plan.state_version = "mine/3", 7
    return plan


def logged(step: HeardStep, policy: str = "mine") -> LoggedStep:
    (found,) = steps_of(heard_rows(step, policy))
    return found


def one_step(**changes: Any) -> HeardStep:
    history = History(4)
    view, plan = history.view(), planned(history)
    outcome = dataclasses.replace(history.step(plan, REMOTE), **changes)
    return HeardStep("e", view, plan, outcome)


def test_a_step_that_followed_our_plan_has_its_propensity_and_versions() -> None:
    step = one_step()
    found = logged(step)
    assert step.plan is not None
    assert_same(found.fit, fit_plan(step.plan, step.view))
    np.testing.assert_array_equal(found.fit.propensity, np.float32(0.25))
    assert (found.policy_version, found.state_version, found.engine) == ("mine/3", 7, "e")
    nameless = dataclasses.replace(step, plan=dataclasses.replace(step.plan, policy_version=""))
    assert logged(nameless).policy_version == "mine"


def test_a_plan_of_the_engine_s_own_has_no_propensity() -> None:
    history = History(4)
    view, plan = history.view(), planned(history, k=2)
    outcome = history.step(plan, PlanSource.LOCAL)
    for held in (plan, None):  # a plan of ours of the same step may have come too late
        found = logged(HeardStep("e", view, held, outcome))
        assert np.isnan(found.fit.propensity).all()
        np.testing.assert_array_equal(found.fit.k, outcome.requested_k)
        np.testing.assert_array_equal(found.fit.proposer, outcome.proposer)
        np.testing.assert_array_equal(found.planned_k, outcome.requested_k)
        assert not found.fit.follows.any()
        assert (found.policy_version, found.state_version) == ("", 0)


def without_first(plan: Plan) -> Plan:
    names = ("request_id", "proposer", "k", "shadow", "propensity", "reason")
    return dataclasses.replace(plan, **{name: getattr(plan, name)[1:] for name in names})


def test_our_plan_says_nothing_of_a_row_that_followed_the_engine_s_own() -> None:
    history = History(4)
    view, plan = history.view(), without_first(planned(history, k=0))
    outcome = history.step(plan, REMOTE)
    outcome.plan_source[0] = PlanSource.LOCAL
    found = logged(HeardStep("e", view, plan, outcome))
    assert np.isnan(found.fit.propensity).tolist() == [True, False, False, False]


def test_a_request_the_plan_had_no_row_for_got_a_default_for_sure() -> None:
    history = History(4)
    view, plan = history.view(), without_first(planned(history))
    found = logged(HeardStep("e", view, plan, history.step(plan, REMOTE)))
    assert found.fit.follows.tolist() == [False, True, True, True]
    assert found.fit.propensity.tolist() == [1.0, 0.25, 0.25, 0.25]
    assert found.planned_k.tolist() == [0, 3, 3, 3]


def test_what_the_plan_cannot_explain_is_what_was_reported() -> None:
    step = one_step()
    requested, proposer = step.outcome.requested_k.copy(), step.outcome.proposer.copy()
    requested[0] += 1
    proposer[1] = 1
    requested[2] -= 1  # blocks were short: still our decision
    odd = dataclasses.replace(step.outcome, requested_k=requested, proposer=proposer)
    found = logged(dataclasses.replace(step, outcome=odd))
    assert np.isnan(found.fit.propensity).tolist() == [True, True, False, False]
    assert found.fit.k.tolist() == [4, 3, 3, 3]
    assert found.fit.proposer.tolist() == [2, 1, 2, 2]
    assert found.policy_version == "mine/3"


def test_an_outcome_of_other_requests_is_refused() -> None:
    step = one_step()
    fewer = History(3)
    other = fewer.step(planned(fewer), REMOTE)
    with pytest.raises(ValueError, match="other requests"):
        heard_rows(dataclasses.replace(step, outcome=other), "mine")


def heard_by(host: Host, ends: list[int], delay: int = 1) -> list[StepOutcome]:
    """Steer an engine that follows plans `delay` steps old and leaves out the views in `ends`."""
    session, _ = host.hello(Hello("e", LIMITS, 1))
    history, plans, outcomes = History(3), [planned(History(3))], []
    outcome = None
    for step_id in range(12):
        view = None if step_id in ends else history.view()
        plan = host.report(session, 0, StepReport(outcome, view))
        plans += [plan] if plan is not None else []
        old = [p for p in plans if p.step_id <= step_id - delay]
        outcome = history.step(old[-1] if old else None, REMOTE)
        outcomes.append(outcome)
    host.observe(session, outcomes[-1])
    return outcomes


def test_steps_are_put_together_from_reports_that_come_later() -> None:
    kept: list[HeardStep] = []
    host = Host("thompson", keep=kept.append)
    outcomes = heard_by(host, ends=[4, 7])
    assert [step.outcome.step_id for step in kept] == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]
    for step in kept:
        assert step.outcome is outcomes[step.view.step_id]
        if step.view.step_id:
            assert step.plan is not None
            assert step.plan.step_id == step.outcome.plan_step_id[0]
            assert not np.isnan(logged(step).fit.propensity).any()
    waiting = host.session("e").waiting
    assert not waiting.views
    assert all(p.step_id + p.expires_after_steps > 11 for p in waiting.plans.values())


def test_a_repeated_outcome_is_kept_once_and_a_new_run_begins_anew() -> None:
    kept: list[HeardStep] = []
    host = Host("none", keep=kept.append)
    session, _ = host.hello(Hello("e", LIMITS, 1))
    history = History(3)
    plan = host.decide(session, history.view())
    outcome = history.step(plan, REMOTE)
    host.observe(session, outcome)
    host.observe(session, outcome)
    assert len(kept) == 1
    again = History(3)
    host.decide(session, history.view())
    host.hello(Hello("e", LIMITS, 2))
    host.observe(session, again.step(None))
    assert len(kept) == 1


def test_an_engine_that_reports_nothing_fills_no_memory() -> None:
    waiting, history = Waiting(), History(2)
    for step_id in range(3 * heard.MOST_WAITING):
        view = dataclasses.replace(history.view(), step_id=step_id)
        plan = dataclasses.replace(planned(history), step_id=step_id)
        waiting.decided(view, plan)
    assert len(waiting.views) == len(waiting.plans) == heard.MOST_WAITING
    assert min(waiting.views) == 2 * heard.MOST_WAITING


@pytest.mark.parametrize("policy", sorted(registry()))
def test_no_policy_writes_to_a_plan_it_has_given(policy: str) -> None:
    made, history = make_policy(policy, None, LIMITS), History(5)
    given: list[tuple[Plan, Plan]] = []
    for _ in range(6):
        plan = made.decide(history.view())
        given.append((plan, copy.deepcopy(plan)))
        made.observe(history.step(plan))
    for plan, as_it_was in given:
        assert_same(
            dataclasses.replace(plan, defaults=None), dataclasses.replace(as_it_was, defaults=None)
        )
