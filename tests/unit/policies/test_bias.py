"""Bias controls: whether a token is verified never hangs on its own draw or on later ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policies.test_allocate import plan_of, view_of

from parlay.policies.allocate import fit_plan
from parlay.policies.types import DRAFT_MODEL, Array

# Bias control: target p = (.7, .3), draft q = (.5, .5). Row 0's next confidence depends on its own
# token: after token 1 the drafter is sure. A rule that looked at later places would emit token 0
# with another probability than p.
P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
AFTER = (0.05, 0.99)


def law_of_first_token(first_place: tuple[float, float]) -> Array:
    """Return the law of row 0's first emitted token, by its first confidence for each token."""
    plan = plan_of([1, 2], [DRAFT_MODEL] * 2, [2, 2], budget_tokens=2)
    view = view_of([1, 2])
    law = np.zeros(2)
    residual = np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum()
    for token in (0, 1):
        confidences = np.array([[first_place[token], AFTER[token]], [0.7, 0.8]], np.float32)
        admitted = fit_plan(plan, view, np.array([2, 2]), confidences).verify_k[0] >= 1
        if admitted:
            accept = min(1.0, P[token] / Q[token])
            law[token] += Q[token] * accept
            law += Q[token] * (1 - accept) * residual
        else:
            law += Q[token] * P
    return law


@pytest.mark.parametrize("confidence", [0.5, 0.56, 0.58, 0.75])
def test_a_tokens_own_draw_and_what_follows_do_not_admit_it(confidence: float) -> None:
    assert law_of_first_token((confidence, confidence)) == pytest.approx(P)


def test_the_control_would_see_a_biased_confidence() -> None:
    assert abs(law_of_first_token((0.3, 0.85))[0] - P[0]) > 0.05


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000))
def test_admission_of_a_place_ignores_that_rows_later_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, depth = 4, 4
    budget = int(rng.integers(1, rows * depth))
    plan = plan_of(list(range(rows)), [DRAFT_MODEL] * rows, [depth] * rows, budget_tokens=budget)
    view = view_of(list(range(rows)))
    drafted = np.full(rows, depth)
    confidences = rng.random((rows, depth)).astype(np.float32)
    before = fit_plan(plan, view, drafted, confidences).verify_k
    row, place = int(rng.integers(rows)), int(rng.integers(depth - 1))
    confidences[row, place + 1 :] = rng.random(depth - place - 1)
    drafted[row] = int(rng.integers(place + 1, depth + 1))
    after = fit_plan(plan, view, drafted, confidences).verify_k
    assert (before[row] > place) == (after[row] > place)
