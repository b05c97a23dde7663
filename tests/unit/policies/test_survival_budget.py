"""The budget of verified tokens: full at first, then what confidences and step times make of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import view_of

from parlay.policies.allocate import fit_plan
from parlay.policies.baselines.survival_budget import MarginFit
from parlay.policies.calibration import calibrated
from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, NO_BUDGET, Array

K = 4


def play(policy: Any, rows: int, steps: int, token_ms: float, seed: int = 0) -> list[Any]:
    """Play requests whose odd ones are hard; a drafter that knows; each token costs token_ms."""
    rng, plans = np.random.default_rng(seed), []
    hard = np.arange(rows) % 2 == 1
    for step in range(steps):
        view = view_of(list(range(1, rows + 1)))
        view.step_id, view.kv_tokens = step, 0
        plan = policy.decide(view)
        plans.append(plan)
        confidence = np.clip(
            np.where(hard, 0.25, 0.9)[:, None] + rng.normal(0, 0.05, (rows, K)), 0.02, 0.98
        )
        drafted = fit_plan(plan, view).k
        verify = fit_plan(plan, view, drafted, confidence.astype(np.float32)).verify_k
        run = np.cumprod(rng.random((rows, K)) < confidence, axis=1).sum(axis=1)
        outcome = outcome_of(
            view.request_id, np.full(rows, DRAFT_MODEL), verify, np.minimum(run, verify)
        )
        outcome.requested_k[:] = outcome.drafted_k[:] = drafted
        outcome.confidences = confidence.astype(np.float32)
        outcome.draft_ms[DRAFT_MODEL], outcome.draft_depth = 0.2 * K, K
        outcome.padded_tokens = rows + int(verify.sum())
        outcome.verify_ms = 10.0 + token_ms * outcome.padded_tokens
        outcome.step_ms = outcome.verify_ms + 0.2 * K + 0.1
        policy.observe(outcome)
    return plans


def test_all_is_verified_until_the_third_fit() -> None:
    plans = play(make_policy("survival_budget", {"k": K}, LIMITS), 8, 340, token_ms=1.0)
    assert all(plan.budget_tokens == NO_BUDGET for plan in plans[:300])
    assert all(0 <= plan.budget_tokens < 8 * K for plan in plans[301:])


def verified_share(token_ms: float) -> tuple[float, float]:
    policy = make_policy("survival_budget", {"k": K}, LIMITS)
    plan = play(policy, 8, 600, token_ms)[-1]
    view = view_of(list(range(1, 9)))
    fit = fit_plan(plan, view)
    confidence = np.tile(np.where(np.arange(8) % 2 == 1, 0.25, 0.9)[:, None], (1, K))
    verify = fit_plan(plan, view, fit.k, confidence.astype(np.float32)).verify_k
    return float(verify[::2].mean()) / K, float(verify[1::2].mean()) / K


def test_dear_tokens_are_verified_where_they_will_hold() -> None:
    cheap_easy, cheap_hard = verified_share(token_ms=0.01)
    dear_easy, dear_hard = verified_share(token_ms=2.0)
    assert cheap_easy > 0.95
    assert dear_hard < cheap_hard
    assert dear_easy > dear_hard + 0.3


def test_tokens_are_ranked_by_their_own_places_line() -> None:
    policy: Any = make_policy("survival_budget", {"k": 2}, LIMITS)
    policy.fit.fits, policy.fit.weights = 3, np.array([[1.0, 2.0], [1.0, -2.0]])
    view, both = view_of([1, 2]), np.array([2, 2])
    plan = dataclasses.replace(policy.decide(view), budget_tokens=2)
    confidences = np.array([[0.9, 0.9], [0.4, 0.4]], np.float32)
    assert fit_plan(plan, view, both, confidences).verify_k.tolist() == [1, 1]
    assert plan.calibration is not None
    mean = dataclasses.replace(plan, calibration=plan.calibration.mean(axis=2))
    assert fit_plan(mean, view, both, confidences).verify_k.tolist() == [2, 0]


def test_the_fit_finds_each_places_line() -> None:
    rng, fit = np.random.default_rng(1), MarginFit(2)
    slopes, offsets = np.array([1.0, 0.5]), np.array([0.3, -0.4])
    for _ in range(1200):
        margin: Array = rng.normal(0.5, 1.5, (4, 2))
        p = 1 / (1 + np.exp(-(margin * slopes + offsets)))
        accepted = np.cumprod(rng.random((4, 2)) < p, axis=1).sum(axis=1)
        fit.observe(margin, accepted, np.full(4, 2))
    assert fit.weights[:, 0] == pytest.approx(slopes, abs=0.3)
    assert fit.weights[:, 1] == pytest.approx(offsets, abs=0.35)
    assert fit.chance(np.full((1, 2), np.nan)).shape == (1, 2)


def test_a_confidence_that_counts_against_itself_has_no_slope() -> None:
    rng, fit = np.random.default_rng(1), MarginFit(1)
    for _ in range(300):
        margin = rng.normal(0.0, 1.0, (4, 1))
        accepted = (
            rng.random(4) < calibrated(np.full(4, 0.5), 0.0, 0.0) - 0.3 * np.sign(margin[:, 0])
        ).astype(int)
        fit.observe(margin, accepted, np.ones(4, int))
    assert fit.weights[0, 0] == 0.0


def test_saved_and_loaded_it_goes_on_alike() -> None:
    one, two = (make_policy("survival_budget", {"k": K}, LIMITS) for _ in range(2))
    play(one, 6, 420, 1.0)
    two.load(one.state())
    first, second = play(one, 6, 30, 1.0, seed=5), play(two, 6, 30, 1.0, seed=5)
    assert [p.budget_tokens for p in first] == [p.budget_tokens for p in second]
    with pytest.raises(ValueError, match="another k"):
        make_policy("survival_budget", {"k": 2}, LIMITS).load(one.state())
