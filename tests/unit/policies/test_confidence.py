"""Bounds that hold at every time, and changes that are found."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.policies.confidence import CLIP, GainSequence, bounds, log_capital
from parlay.policies.types import Array


def sums(y: Array) -> tuple[int, float, float]:
    return len(y), float(y.sum()), float((y * y).sum())


NOISES = {
    "normal": lambda rng, n: 0.12 * rng.normal(size=n),
    "heavy tails": lambda rng, n: 0.06 * rng.standard_t(2, size=n),
    "two values": lambda rng, n: 0.2 * rng.choice([-1.0, 1.0], size=n),
    "spread that wanders": lambda rng, n: rng.normal(size=n) * np.geomspace(0.02, 0.5, n),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_a_bet_against_the_truth_rarely_ever_wins(noise: str, alpha: float) -> None:
    rng, runs, pairs = np.random.default_rng(1), 400, 120
    ever = 0
    for _ in range(runs):
        y = NOISES[noise](rng, pairs)
        total, squares = np.cumsum(y), np.cumsum(y * y)
        ever += any(
            log_capital(n + 1, total[n], squares[n], 0.0) >= math.log(1 / alpha) and total[n] < 0
            for n in range(pairs)
        )
    assert ever / runs <= alpha + 2 * math.sqrt(alpha * (1 - alpha) / runs)


@given(st.lists(st.floats(-0.9, 0.9), min_size=1, max_size=60), st.floats(0.01, 0.4))
def test_bounds_bracket_the_mean_and_are_where_the_bet_wins(y: list[float], alpha: float) -> None:
    count, total, squares = sums(np.array(y))
    lower, upper = bounds(count, total, squares, alpha)
    assert lower <= total / count <= upper
    for bound in (lower, upper):
        if math.isfinite(bound):
            assert log_capital(count, total, squares, bound) >= math.log(1 / alpha)
    surer = bounds(count, total, squares, alpha / 2)
    assert surer[0] <= lower + 1e-5
    assert surer[1] >= upper - 1e-5


def test_bounds_close_in() -> None:
    y = 0.1 + 0.12 * np.random.default_rng(0).normal(size=400)
    widths = [np.subtract(*bounds(*sums(y[:n]), 0.05)[::-1]) for n in (20, 100, 400)]
    assert widths[0] > widths[1] > widths[2]
    assert widths[2] < 0.06


def test_nothing_seen_bounds_nothing() -> None:
    assert bounds(0, 0.0, 0.0, 0.05) == (-math.inf, math.inf)


def test_a_gain_of_a_tenth_less_is_known_after_some_twenty_pairs() -> None:
    needed = []
    for seed in range(40):
        rng, gains = np.random.default_rng(seed), GainSequence(0.05)
        while gains.upper >= 0.0:
            gains.add(float(np.log(0.9) + 0.1 * rng.normal()))
            needed.append(gains.count) if gains.upper < 0.0 else None
    assert 8 <= np.median(needed) <= 24


def test_a_shift_is_found_and_starts_the_sequence_anew() -> None:
    rng, gains = np.random.default_rng(2), GainSequence(0.05)
    for _ in range(60):
        gains.add(float(0.1 + 0.1 * rng.normal()))
    assert gains.count > 20
    found = [gains.add(float(-0.2 + 0.1 * rng.normal())) for _ in range(20)]
    assert any(found[:8])
    assert gains.mean < 0.0
    assert gains.count < 20


def test_false_alarms_are_as_rare_as_stated() -> None:
    rng, gains = np.random.default_rng(3), GainSequence(0.05)
    alarms = sum(gains.add(float(y)) for y in 0.1 * rng.normal(size=6000))
    assert alarms <= 2.5 * 6000 / 470


def test_one_wild_pair_counts_for_no_more_than_the_clip() -> None:
    gains = GainSequence(0.05)
    gains.add(50.0)
    assert gains.mean == CLIP


def test_a_level_reached_by_luck_is_not_kept() -> None:
    gains = GainSequence(0.05)
    for _ in range(10):
        gains.add(0.3)
    gains.level()
    assert gains.recent == 0.0
    assert gains.count == 0
    assert gains.upper == math.inf


def test_state_is_kept_whole() -> None:
    rng, gains, other = np.random.default_rng(4), GainSequence(0.05), GainSequence(0.05)
    for y in 0.1 * rng.normal(size=30):
        gains.add(float(y))
    other.load(gains.state())
    for y in 0.3 + 0.1 * rng.normal(size=30):
        assert gains.add(float(y)) == other.add(float(y))
        assert (gains.lower, gains.upper, gains.recent) == (other.lower, other.upper, other.recent)
    with pytest.raises(ValueError, match="9 numbers"):
        other.load(np.zeros(3))
