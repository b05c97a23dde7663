"""Learning that waits until the plan is out: nothing lost, nothing learned twice or wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from parlay.controller.host import Host
from parlay.policies.cost import behind
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import Plan, PlanSource, Proposer, StepOutcome
from parlay.protos.codec import HalfReport, Hello, StepReport, encode_request, open_request


def reported(
    host: Host, policy: str, steps: int, settle: bool = True
) -> tuple[list[Plan], list[StepOutcome]]:
    """Run an engine whose reports each tell of the step before; return plans and outcomes."""
    stream = host.new_stream()
    session, _ = host.hello(Hello(policy, LIMITS), stream)
    history, plans, outcomes = History(16), list[Plan](), list[StepOutcome]()
    for _ in range(steps):
        plan = host.report(
            session, stream, StepReport(outcomes[-1] if outcomes else None, history.view())
        )
        assert plan is not None
        plans.append(plan)
        if settle:
            host.settle(session)
        outcomes.append(history.step(plan, PlanSource.REMOTE))
    return plans, outcomes


def test_what_a_report_tells_is_learned_once_its_plan_is_out() -> None:
    host = Host("pilot", late=True)
    stream = host.new_stream()
    session, _ = host.hello(Hello("e", LIMITS), stream)
    history, policy = History(16), cast(Any, session.policy)
    plan = host.report(session, stream, StepReport(None, history.view()))
    outcome = history.step(plan, PlanSource.REMOTE)
    before = policy.policy.core.acceptance.version
    assert host.report(session, stream, StepReport(outcome, history.view())) is not None
    assert policy.policy.core.acceptance.version == before
    assert session.counts.outcomes == 1
    host.settle(session)
    assert policy.policy.core.acceptance.version == before + 1
    assert session.put_off is None
    host.settle(session)
    assert policy.policy.core.acceptance.version == before + 1


def test_nothing_is_lost_where_nobody_settles() -> None:
    host = Host("pilot", late=True)
    reported(host, "e", 30, settle=False)
    session = host.session("e")
    assert (session.counts.outcomes, session.put_off is None) == (29, False)
    host.leave(session, session.stream)
    policy = cast(Any, session.policy)
    assert policy.policy.core.acceptance.version == 29


@pytest.mark.parametrize("late", [False, True])
def test_what_was_caught_up_is_that_of_the_steps_own_view(late: bool) -> None:
    host = Host("goodput", late=late)
    stream = host.new_stream()
    session, _ = host.hello(Hello("e", LIMITS), stream)
    step_time, told = cast(Any, session.policy).step_time, dict[int, float]()
    learn = step_time.observe

    def observe(outcome: StepOutcome, catch_up_tokens: float) -> None:
        told[outcome.step_id] = catch_up_tokens
        learn(outcome, catch_up_tokens)

    step_time.observe = observe
    history, owed, outcome = History(16), dict[int, float](), None
    for _ in range(60):
        view = history.view()
        plan = host.report(session, stream, StepReport(outcome, view))
        host.settle(session)
        outcome = history.step(plan, PlanSource.REMOTE)
        drafts = outcome.proposer == Proposer.DRAFT_MODEL
        owed[view.step_id] = float(behind(view.draft_kv_lag[drafts]).sum())
    assert len(told) == 59
    assert told == {step: owed[step] for step in told}
    assert sum(told.values()) > 0


def test_learning_late_costs_no_goodput() -> None:
    found = []
    for late in (False, True):
        host = Host("goodput", late=late)
        _, outcomes = reported(host, "e", 300)
        tokens = sum(int(outcome.emitted.sum()) for outcome in outcomes)
        found.append(tokens / sum(outcome.step_ms for outcome in outcomes))
        assert cast(Any, host.session("e").policy).acceptance.version == 299
    assert found[1] > 0.95 * found[0]


@pytest.mark.parametrize("policy", ["none", "ucb_spec", "goodput_batch"])
def test_a_policy_that_does_not_allow_it_learns_first(policy: str) -> None:
    plans = [reported(Host(policy, late=late), "e", 60)[0] for late in (False, True)]
    for ours, theirs in zip(*plans, strict=True):
        np.testing.assert_array_equal(ours.k, theirs.k)


def test_a_step_whose_view_was_left_out_is_learned_first() -> None:
    host = Host("goodput", late=True)
    stream = host.new_stream()
    session, _ = host.hello(Hello("e", LIMITS), stream)
    history = History(16)
    plan = host.report(session, stream, StepReport(None, history.view()))
    first = history.step(plan, PlanSource.REMOTE)
    host.report(session, stream, StepReport(first, None))
    assert session.put_off is None
    second = history.step(plan, PlanSource.REMOTE)
    host.report(session, stream, StepReport(second, history.view()))
    assert session.put_off is None
    assert session.counts.outcomes == 2


def opened(outcome: StepOutcome, history: History) -> HalfReport:
    report = open_request(encode_request(StepReport(outcome, history.view())))
    assert isinstance(report, HalfReport)
    return report


def test_a_malformed_outcome_is_refused_once_its_plan_is_out() -> None:
    host = Host("pilot", late=True)
    stream = host.new_stream()
    session, _ = host.hello(Hello("e", LIMITS), stream)
    history = History(16)
    plan = host.report(session, stream, StepReport(None, history.view()))
    outcome = history.step(plan, PlanSource.REMOTE)
    wrong = replace(outcome, accepted=(outcome.verified_k + 1).astype(np.int16))
    assert host.report(session, stream, opened(wrong, history)) is not None
    with pytest.raises(ValueError, match="accepted must not be above verified_k"):
        host.settle(session)
    assert (session.counts.outcomes, session.counts.ignored_outcomes) == (0, 1)
    # Who comes next did not send it.
    outcome = history.step(None)
    assert host.report(session, stream, opened(outcome, history)) is not None
    host.leave(session, stream)
    policy = cast(Any, session.policy)
    assert (session.counts.outcomes, policy.policy.core.acceptance.version) == (1, 1)


def test_an_outcome_that_may_not_wait_is_checked_before_it_counts() -> None:
    host = Host("pilot")
    stream = host.new_stream()
    session, _ = host.hello(Hello("e", LIMITS), stream)
    history = History(16)
    outcome = history.step(None)
    wrong = replace(outcome, accepted=(outcome.verified_k + 1).astype(np.int16))
    with pytest.raises(ValueError, match="accepted must not be above verified_k"):
        host.report(session, stream, opened(wrong, history))
    assert session.last_outcome == -1
    assert session.counts.outcomes == 0
