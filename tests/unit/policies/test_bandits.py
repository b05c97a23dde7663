"""Bandits find the best arm, say how likely they were to pull it, and keep what they learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import view_of

from parlay.policies.bandits.ucb_spec import radius
from parlay.policies.policy import make_policy
from parlay.policies.types import PlanSource, Proposer

ARMS = ("none:0", "ngram:3", "draft_model:3")
STEP_MS = {Proposer.NONE: 0.0, Proposer.NGRAM: 1.0, Proposer.DRAFT_MODEL: 4.0}
HOLD = {Proposer.NONE: 0.0, Proposer.NGRAM: 0.3, Proposer.DRAFT_MODEL: 0.8}
ROWS = 4


def pulls(policy: Any, steps: int, seed: int = 0, lag: int = 1, rows: int = ROWS) -> list[Proposer]:
    """Return which proposer each step had; outcomes come `lag` steps after their plan."""
    rng, waiting, found = np.random.default_rng(seed), [], []
    for step in range(steps):
        view = view_of(list(range(rows)))
        view.step_id = step
        plan = policy.decide(view)
        who = Proposer(int(plan.proposer[0]))
        found.append(who)
        held = np.cumprod(rng.random((rows, 3)) < HOLD[who], axis=1).sum(axis=1)
        outcome = outcome_of(view.request_id, plan.proposer, plan.k, np.minimum(held, plan.k))
        outcome.plan_step_id[:] = step
        outcome.plan_source[:] = PlanSource.REMOTE
        outcome.step_id = step
        outcome.step_ms = 10.0 + STEP_MS[who]
        waiting.append(outcome)
        if len(waiting) > lag:
            policy.observe(waiting.pop(0))
    return found


@pytest.mark.parametrize("name", ["ucb_spec", "exp3_spec", "beg_mab"])
@pytest.mark.parametrize("lag", [0, 3])
def test_the_best_arm_wins(name: str, lag: int) -> None:
    policy = make_policy(name, {"arms": ARMS}, LIMITS)
    found = pulls(policy, 1500, lag=lag)
    assert set(found[:60]) == set(HOLD), "every arm is tried"
    assert np.mean([who is Proposer.DRAFT_MODEL for who in found[-300:]]) > 0.8


def test_the_radius_is_the_sources() -> None:
    n, t, arms, longest, delta = 7, 40, 3, 5, 0.05
    inside = 1 + 2 * math.log(arms * t**2 * (1 + n) ** 0.5 / delta)
    expected = longest / 2 * math.sqrt((1 + n) / n**2 * inside)
    assert radius(np.array([n, 9, 24]), t, longest, delta)[0] == pytest.approx(expected)


def test_propensities_are_the_chances_that_arms_are_drawn_with() -> None:
    policy = make_policy("exp3_spec", {"arms": ARMS}, LIMITS)
    pulls(policy, 200)
    p = policy.probabilities()  # type: ignore[attr-defined]
    assert p.sum() == pytest.approx(1.0)
    drawn = np.zeros(len(ARMS))
    for _ in range(3000):
        plan = policy.decide(view_of([1]))
        arm = list(HOLD).index(Proposer(int(plan.proposer[0])))
        drawn[arm] += 1
        assert plan.propensity[0] == pytest.approx(p[arm])
    assert drawn / drawn.sum() == pytest.approx(p, abs=0.03)


def test_an_outcome_of_another_plan_teaches_nothing() -> None:
    policy = make_policy("ucb_spec", {"arms": ARMS}, LIMITS)
    plan = policy.decide(view_of([1]))
    other = outcome_of(np.array([1]), plan.proposer, plan.k, plan.k)
    other.plan_source[:] = PlanSource.REMOTE
    other.plan_step_id[:] = 77
    policy.observe(other)
    assert policy.state()["pulls"].sum() == 0


def test_beg_mab_counts_time_and_keeps_groups_of_batch_sizes_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_policy("beg_mab", {"arms": ARMS}, LIMITS)
    assert pulls(policy, 400)[-1] is Proposer.DRAFT_MODEL
    monkeypatch.setitem(STEP_MS, Proposer.DRAFT_MODEL, 90.0)
    slow = pulls(policy, 400, rows=1)
    assert np.mean([who is not Proposer.DRAFT_MODEL for who in slow[-100:]]) > 0.8
    assert policy.state()["seen"].sum(axis=1).tolist()[2:] == [0, 0]


@pytest.mark.parametrize("name", ["ucb_spec", "exp3_spec", "beg_mab"])
def test_a_loaded_bandit_goes_on_with_the_same_arms(name: str) -> None:
    policy, other = (make_policy(name, {"arms": ARMS}, LIMITS) for _ in range(2))
    pulls(policy, 100)
    other.load(policy.state())
    assert pulls(policy, 50, seed=2) == pulls(other, 50, seed=2)
    with pytest.raises(ValueError, match="with 4 arms"):
        make_policy(name, {}, LIMITS).load(policy.state())


def contextual(policy: Any, steps: int, seed: int = 0) -> list[list[tuple[int, Proposer]]]:
    """Play requests of which those with a long match hold n-grams, the others drafts.

    Returns for each step (match length, proposer) of each row.
    """
    rng, found = np.random.default_rng(seed), []
    for step in range(steps):
        match = np.array([0, 12, 0, 12], np.int32)
        view = view_of(list(range(4)), match_tokens=match)
        view.step_id = step
        plan = policy.decide(view)
        who = [Proposer(int(p)) for p in plan.proposer]
        rows = list(zip(match.tolist(), who, strict=True))
        hold = [HOLD[w] if w is not Proposer.NGRAM else 0.9 * (m > 0) for m, w in rows]
        held = np.cumprod(rng.random((4, 3)) < np.array(hold)[:, None], axis=1).sum(axis=1)
        accepted = np.minimum(held, plan.k)
        outcome = outcome_of(view.request_id, plan.proposer, plan.k, accepted)
        outcome.plan_step_id[:] = step
        outcome.plan_source[:] = PlanSource.REMOTE
        outcome.step_id, outcome.step_ms = step, 10.0
        policy.observe(outcome)
        found.append(rows)
    return found


@pytest.mark.parametrize("name", ["linucb", "thompson"])
def test_each_request_gets_the_arm_that_fits_it(name: str) -> None:
    policy = make_policy(name, {"arms": ARMS}, LIMITS)
    rows = [row for step in contextual(policy, 400)[-100:] for row in step]
    for match, best in ((0, Proposer.DRAFT_MODEL), (12, Proposer.NGRAM)):
        mine = [who for m, who in rows if m == match]
        assert np.mean([who is best for who in mine]) > 0.8
    again = make_policy(name, {"arms": ARMS}, LIMITS)
    again.load(policy.state())
    assert contextual(again, 20, seed=3) == contextual(policy, 20, seed=3)


def test_thompsons_propensities_are_about_how_often_it_pulls() -> None:
    policy = make_policy("thompson", {"arms": ARMS, "scale": 2.0}, LIMITS)
    contextual(policy, 10)
    view = view_of([1], match_tokens=np.array([3], np.int32))
    plans = [policy.decide(view) for _ in range(800)]
    for arm in (Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL):
        said = [float(p.propensity[0]) for p in plans if p.proposer[0] == arm]
        assert len(said) / len(plans) == pytest.approx(np.mean(said), abs=0.06)


@pytest.mark.parametrize("name", ["linucb", "thompson"])
def test_an_arm_that_a_row_may_not_pull_is_not_pulled(name: str) -> None:
    policy = make_policy(name, {"arms": ARMS}, LIMITS)
    contextual(policy, 50)
    view = view_of([1, 2])
    view.proposer_mask[:] = 1 << Proposer.NONE
    for _ in range(30):
        assert policy.decide(view).proposer.tolist() == [Proposer.NONE] * 2
