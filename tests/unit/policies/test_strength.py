"""How far a request's own record is believed: found from what requests do, whatever chose k."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policies.test_acceptance import outcome_of

from parlay.policies.acceptance import Acceptance
from parlay.policies.strength import LEAST_STRENGTH, MOST_STRENGTH, Strength, lean
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, PROPOSERS, Array

HAZARD = np.array([0.35, 0.3, 0.25, 0.25])


def learned(spread: float, choose_deep: bool, steps: int = 1200, rows: int = 16) -> Array:
    """Return the strength of each proposer after the draft model drafted for unlike requests.

    Their levels are gamma variates of mean 1 and variance `spread`; each runs for 60 steps.
    choose_deep: only requests that held of late are drafted deep.
    """
    rng, learner = np.random.default_rng(3), Acceptance(len(HAZARD))
    ids, level, held = np.arange(rows), np.ones(rows), np.ones(rows)
    for step in range(steps):
        new = (np.arange(rows) + step) % 60 == 0 if step else np.ones(rows, bool)
        ids = np.where(new, ids + rows, ids)
        draws = rng.gamma(1.0 / spread, spread, rows) if spread else np.ones(rows)
        level = np.where(new, draws, level)
        flips = rng.random((rows, len(HAZARD))) >= np.minimum(level[:, None] * HAZARD, 0.98)
        k = np.where(held > 0.5, len(HAZARD), 1) if choose_deep else np.full(rows, len(HAZARD))
        accepted = np.minimum(np.cumprod(flips, axis=1).sum(axis=1), k)
        held = 0.7 * held + 0.3 * (accepted > 0)
        learner.observe(outcome_of(ids, np.full(rows, DRAFT_MODEL), k, accepted))
    strength: Array = learner.state()["strength"][0]
    return strength


@pytest.mark.parametrize("choose_deep", [False, True])
def test_requests_that_are_alike_are_hardly_told_apart_and_unlike_ones_soon(
    choose_deep: bool,
) -> None:
    alike, unlike, very = (learned(spread, choose_deep)[DRAFT_MODEL] for spread in (0.0, 0.3, 1.0))
    assert alike > 15.0
    # The variance of the levels is 1 / strength.
    assert 1.0 / 0.3 / 1.6 < unlike < 1.6 / 0.3
    assert 1.0 / 1.6 < very < 1.6
    others = learned(0.3, choose_deep, steps=40)[[NGRAM, MEDUSA]]
    assert others.tolist() == Strength().of[[NGRAM, MEDUSA]].tolist()


@given(st.floats(0.5, 60.0), st.floats(0.2, 3.0), st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_the_lean_is_the_slope_of_the_frailtys_logarithm(
    strength: float, level: float, rejected: float, expected: float
) -> None:
    def log_frailty(a: float) -> float:
        return float(np.log((a * level + rejected) / (a + expected)))

    slope = (log_frailty(strength * 1.0001) - log_frailty(strength / 1.0001)) / (2e-4)
    found = lean(strength, level, rejected, expected)
    assert found == pytest.approx(slope, abs=1e-4)
    assert abs(found) <= 1.0


def test_one_draft_teaches_what_it_teaches_in_an_array() -> None:
    rng, alone, among = np.random.default_rng(0), Strength(), Strength()
    for _ in range(300):
        proposer, values = int(rng.integers(1, PROPOSERS)), rng.uniform(-1.0, 1.0, 4)
        values[2:] = np.abs(values[2:])
        alone.learn_one(proposer, *values.tolist())
        among.learn(np.array([proposer]), *values[:, None])
    assert alone.state() == pytest.approx(among.state(), rel=1e-9)
    assert (alone.of[1:] != alone.of[0]).all()


def test_it_stays_within_bounds_whatever_is_seen() -> None:
    for excess, bound in ((50.0, MOST_STRENGTH), (-50.0, LEAST_STRENGTH)):
        strength = Strength()
        for _ in range(30):
            strength.learn(
                np.full(8, NGRAM), np.ones(8), np.full(8, excess), np.ones(8), np.ones(8)
            )
            strength.learn_one(MEDUSA, 1.0, excess, 1.0, 1.0)
        assert strength.of[[NGRAM, MEDUSA]].tolist() == [bound] * 2


def test_a_state_goes_on_and_one_that_does_not_fit_is_refused() -> None:
    strength, again = Strength(), Strength()
    strength.learn_one(NGRAM, 0.5, 1.0, 0.5, 7.0)
    again.load(strength.state())
    for one in (strength, again):
        one.learn_one(NGRAM, 0.5, -1.0, 0.5, 7.0)
    assert again.state().tolist() == strength.state().tolist()
    with pytest.raises(ValueError, match="strength"):
        again.load(np.zeros((2, PROPOSERS)))


def test_a_state_from_before_there_were_strengths_is_taken() -> None:
    learner, again = Acceptance(4), Acceptance(4)
    ids = np.array([1, 2])
    learner.rows_of(ids, np.full(2, 7), np.full(2, 50))
    learner.observe(outcome_of(ids, np.full(2, NGRAM), np.full(2, 3), np.array([0, 3]), 5))
    again.load({k: v for k, v in learner.state().items() if k != "strength"})
    assert again.state()["strength"].tolist() == Strength().state().tolist()
    assert again.state()["request_counts"].tolist() == learner.state()["request_counts"].tolist()
