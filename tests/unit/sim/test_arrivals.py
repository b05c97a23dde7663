"""Arrival processes: rates, bursts, and draws that do not depend on how they are read."""

from __future__ import annotations

from itertools import islice
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.policies.types import Array
from parlay.sim.arrivals import (
    BLOCK,
    Quantiles,
    Stream,
    Times,
    batches,
    correlated,
    gamma,
    markov_modulated,
    normals,
    poisson,
)
from parlay.sim.workload import dispersion


def first(times: Times, n: int) -> Array:
    found: list[float] = []
    while len(found) < n:
        found += next(times).tolist()
    return np.array(found[:n])


def processes(seed: int) -> list[Times]:
    gaps = Quantiles.log_normal(0.1, 1.0, 1e-4, 10.0)
    return [
        poisson(5.0, seed),
        gamma(5.0, 4.0, seed),
        markov_modulated([1.0, 30.0, 0.0], [2.0, 1.0, 3.0], seed),
        correlated(gaps, 0.3, 7, seed),
        batches(3.0, Quantiles.log_normal(10.0, 0.3, 1.0, 30.0), seed),
    ]


@pytest.mark.parametrize("kind", range(5))
def test_the_same_seed_gives_the_same_rising_times_and_another_seed_others(kind: int) -> None:
    one, again, other = (first(processes(seed)[kind], 3000) for seed in (7, 7, 8))
    assert (one == again).all()
    assert (np.diff(one) >= 0.0).all()
    assert one[0] >= 0.0
    assert not (one == other).all()


@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.integers(1, 3000))
def test_a_draw_is_a_function_of_seed_stream_and_index(seed: int, index: int, n: int) -> None:
    part = normals(seed, Stream.GAP, index, n)
    whole = normals(seed, Stream.GAP, 0, index + n)
    assert (part == whole[index:]).all()
    assert not (part == normals(seed, Stream.PROMPT, index, n)).any()


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    gaps = np.diff(first(gamma(20.0, cv, 3), 200_000))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_are_exponential_and_counts_disperse_as_much_as_they_are() -> None:
    times = first(poisson(4.0, 1), 100_000)
    levels = np.array([0.1, 0.5, 0.9, 0.99])
    assert np.quantile(np.diff(times), levels) == pytest.approx(-np.log(1 - levels) / 4, rel=0.03)
    assert dispersion(times, 10.0) == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("window_s", [0.5, 5.0])
def test_markov_modulated_counts_disperse_as_the_closed_form_says(window_s: float) -> None:
    rates, dwell = [2.0, 20.0], [1.5, 0.5]
    times = first(markov_modulated(rates, dwell, 5), 100_000)
    leave = [1 / d for d in dwell]
    both = sum(leave)
    rate = (rates[0] * leave[1] + rates[1] * leave[0]) / both
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.03)
    limit = 2 * leave[0] * leave[1] * (rates[0] - rates[1]) ** 2 / (both**3 * rate)
    short = (1 - exp(-both * window_s)) / (both * window_s)
    assert dispersion(times, window_s) == pytest.approx(1 + limit * (1 - short), rel=0.06)


def test_markov_modulated_states_take_their_shares_of_time_and_none_follows_itself() -> None:
    times = first(markov_modulated([0.0, 50.0, 50.0], [4.0, 1.0, 1.0], 2), 100_000)
    assert len(times) / times[-1] == pytest.approx(50 * 2 / 6, rel=0.05)
    # Alone, state 0 lasts 4 s; were it to follow itself it would last longer.
    silences = np.diff(times)[np.diff(times) > 0.5]
    assert silences.mean() == pytest.approx(0.5 + 4.0, rel=0.07)


def test_markov_modulated_arrivals_start_as_they_go_on() -> None:
    early = [first(markov_modulated([1.0, 100.0], [90.0, 10.0], s), 1)[0] < 0.1 for s in range(400)]
    assert np.mean(early) == pytest.approx(0.1 + 0.9 * 0.095, abs=0.06)


def test_correlated_gaps_keep_their_quantiles_and_come_in_spells() -> None:
    gaps = Quantiles.log_normal(0.1, 1.5, 1e-4, 100.0)
    alone = np.diff(first(correlated(gaps, 0.0, 50, 4), 60_000))
    spells = np.diff(first(correlated(gaps, 0.4, 50, 4), 60_000))
    levels = [0.05, 0.5, 0.95]
    z = np.array([-1.6449, 0.0, 1.6449])
    assert np.quantile(spells, levels) == pytest.approx(0.1 * np.exp(1.5 * z), rel=0.08)
    score = np.log(spells / 0.1) / 1.5
    near = np.corrcoef(score[:-1], score[1:])[0, 1]
    far = np.corrcoef(score[:-200], score[200:])[0, 1]
    assert near == pytest.approx(0.4, abs=0.03)
    assert abs(far) < 0.03
    assert dispersion(np.cumsum(spells), 10.0) > 2 * dispersion(np.cumsum(alone), 10.0)


def test_dispersion_counts_whole_windows_alone() -> None:
    assert dispersion(np.array([0.0, 0.5, 1.0, 1.5, 2.0]), 1.0) == 0.0
    with pytest.raises(ValueError, match="fewer than two windows"):
        dispersion(np.array([0.0, 1.5]), 1.0)


def test_batches_come_once_a_period() -> None:
    times = first(batches(3.0, Quantiles.log_normal(10.0, 0.3, 2.0, 30.0), 1), 20_000)
    moments, sizes = np.unique(times[:-30], return_counts=True)
    assert (np.diff(moments) == 3.0).all()
    assert np.median(sizes) == 10
    assert sizes[:-1].min() >= 2


@given(
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40),
    st.floats(-6, 6),
)
def test_quantiles_of_a_sample_rise_within_its_range(values: list[float], score: float) -> None:
    found = Quantiles.of_sample(values)
    low, high = found.at(np.array([score, score + 0.5]))
    assert min(values) * (1 - 1e-9) <= low <= high <= max(values) * (1 + 1e-9)


def test_quantiles_of_a_table_are_the_tables() -> None:
    found = Quantiles.of_table([0.1, 0.5, 0.9], [1.0, 5.0, 80.0])
    drawn = found.at(normals(0, Stream.GAP, 0, 100 * BLOCK))
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx([1.0, 5.0, 80.0], rel=0.03)
    assert drawn.max() == pytest.approx(80.0)


def test_a_log_normal_is_clipped_and_may_have_no_spread() -> None:
    clipped = Quantiles.log_normal(100.0, 2.0, 10.0, 500.0).at(normals(0, Stream.GAP, 0, 5000))
    assert (clipped.min(), clipped.max()) == pytest.approx((10.0, 500.0))
    assert np.median(clipped) == pytest.approx(100.0, rel=0.1)
    still = Quantiles.log_normal(7.0, 0.0, 1.0, 9.0).at(np.array([-3.0, 0.0, 3.0]))
    assert still == pytest.approx([7.0, 7.0, 7.0])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="rate and a cv above 0"):
        poisson(0.0, 1)
    with pytest.raises(ValueError, match="two or more rates"):
        markov_modulated([1.0], [1.0], 1)
    with pytest.raises(ValueError, match="not all 0"):
        markov_modulated([0.0, 0.0], [1.0, 1.0], 1)
    with pytest.raises(ValueError, match="dwells above 0"):
        markov_modulated([1.0, 2.0], [1.0, 0.0], 1)
    with pytest.raises(ValueError, match="memory at least 1"):
        correlated(Quantiles.log_normal(1.0, 1.0, 0.1, 9.0), 0.1, 0, 1)
    with pytest.raises(ValueError, match="least <= median"):
        Quantiles.log_normal(1.0, 1.0, 2.0, 9.0)
    with pytest.raises(ValueError, match="must be above 0 and rise"):
        Quantiles.of_table([0.1, 0.9], [5.0, 4.0])
    with pytest.raises(ValueError, match="no values"):
        Quantiles.of_sample([])
    with pytest.raises(ValueError, match="a seed must be"):
        list(islice(poisson(1.0, -1), 1))
