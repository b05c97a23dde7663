"""What a pair says of a candidate, when its trial must end, and how its rows join a plan."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.controller.trials import DRAFTS, Running

from parlay.controller.blocks import Blocks
from parlay.controller.canary import mixed, on_canary
from parlay.controller.candidate import LOSS_STEPS, Candidate, Pair, Stage, in_words, ratio_of
from parlay.controller.host import Host
from parlay.policies.allocate import fit_plan
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import NO_BUDGET, PlanSource, Reason


def candidate() -> Candidate:
    return Candidate(DRAFTS, Stage.CANARY, 0.1, switch_back=True)


def pair(ratio: float, lost_ms: float = 0.0) -> Pair:
    return Pair(math.log(ratio), lost_ms, elapsed_ms=300.0, step_ms=10.0)


def test_a_candidate_that_is_surely_slower_ends_though_it_lost_little() -> None:
    tried = candidate()
    reasons = [tried.compared(pair(0.9 + 0.01 * (n % 3))) for n in range(40)]
    first = next(n for n, why in enumerate(reasons) if why)
    assert first > 4
    assert reasons[first].startswith("slower than the incumbent: goodput 0.9")


def test_a_candidate_that_lost_too_much_ends_before_it_is_surely_slower() -> None:
    tried = candidate()
    assert not tried.compared(pair(0.3, 0.9 * LOSS_STEPS * 10.0))
    assert "more than 32 steps of 10.0 ms" in tried.compared(pair(0.3, 0.2 * LOSS_STEPS * 10.0))


def test_gains_pay_for_no_later_loss() -> None:
    tried = candidate()
    for _ in range(50):
        assert not tried.compared(pair(2.0, -1e4))
    assert tried.compared(pair(0.3, 1.1 * LOSS_STEPS * 10.0))


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30))
def test_bounds_hold_the_estimate(ratios: list[float]) -> None:
    tried = candidate()
    for ratio in ratios:
        tried.compared(pair(ratio))
    found = ratio_of(tried.speed)
    if found.pairs:
        assert found.low <= found.ratio * 1.0001
        assert found.ratio <= found.high * 1.0001
        assert f"{found.pairs} pairs" in in_words(found, "blocks")


def test_requests_end_a_trial_only_beyond_the_loss_that_is_allowed() -> None:
    tried = candidate()
    assert not any(tried.ended(math.log(0.95) + 0.01 * (n % 2)) for n in range(100))
    tried = candidate()
    assert any(tried.ended(math.log(0.7) + 0.01 * (n % 2)) for n in range(100))


def test_either_policy_may_be_the_first_of_a_pair() -> None:
    firsts, history = [], History(4)
    blocks, before = Blocks("e"), None
    for _ in range(600):
        view = history.view()
        now = blocks.next(view)
        if before is None and now is not None:
            firsts.append(now)
        before = now
        plan = make_policy("none").decide(view)
        blocks.observe(history.step(plan, PlanSource.REMOTE))
    assert len(firsts) > 8
    assert 0.2 < np.mean(firsts) < 0.8


@pytest.mark.parametrize("active", ["goodput", "tetris", "fixed"])
def test_rows_of_the_candidate_are_followed_in_the_incumbents_plan(active: str) -> None:
    engine = Running(Host(active))
    engine.run(40)
    view = engine.history.view()
    plan = engine.session.policy.decide(view)
    ours = make_policy("fixed", dict(DRAFTS.settings), LIMITS).decide(view)
    theirs = on_canary("e", view.request_id, 0.5)
    both = mixed(plan, ours, view, theirs, 0.5)
    view.match_tokens = (view.match_tokens == 0).astype(np.int32) * 5
    fit, alone = fit_plan(both, view), fit_plan(ours, view)
    np.testing.assert_array_equal(fit.k[theirs], alone.k[theirs])
    np.testing.assert_array_equal(fit.proposer[theirs], alone.proposer[theirs])
    np.testing.assert_array_equal(both.k[~theirs], plan.k[~theirs])
    if plan.survival is None:
        np.testing.assert_array_equal(both.reason[theirs], ours.reason[theirs])
    else:
        assert (both.reason[theirs] == Reason.EXPLORE).all()
    if plan.budget_tokens != NO_BUDGET:
        assert both.k.sum() <= max(both.budget_tokens, 0)
