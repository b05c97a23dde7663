"""When requests come: arrival processes whose every draw is named by (seed, stream, index).

A process is an endless iterator of blocks, each f64 of rising times in seconds from the start. The
draws behind it come from a counter-based generator (Philox; Salmon et al., SC'11), so the same seed
gives the same arrivals however far and in whatever pieces they are read, and a stream's draws do
not move when another stream is read less or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from math import inf, isfinite, log
from statistics import NormalDist
from typing import Self

import numpy as np

from parlay.policies.types import Array

BLOCK = 1024
"""How many draws share a key."""

Times = Iterator[Array]


class Stream(IntEnum):
    """What a draw is for."""

    GAP = 0
    SLOW = 1
    DWELL = 2
    TASK = 3
    PROMPT = 4
    OUTPUT = 5
    SHARED = 6
    KIND = 7


def draws(seed: int, stream: Stream, block: int) -> np.random.Generator:
    """Return the generator of one block of a stream; raises ValueError for an impossible seed."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"a seed must be from 0 to 2^64 - 1, not {seed}")
    key = np.array([seed, stream], np.uint64)
    return np.random.Generator(np.random.Philox(counter=[0, 0, block, 0], key=key))


def normals(seed: int, stream: Stream, first: int, n: int) -> Array:
    """Return standard normals f64 [n], those of indices from `first` on."""
    blocks = range(first // BLOCK, (first + n - 1) // BLOCK + 1)
    drawn = [draws(seed, stream, b).standard_normal(BLOCK) for b in blocks]
    found: Array = np.concatenate(drawn)[first % BLOCK :][:n]
    return found


@dataclass(slots=True, frozen=True)
class Quantiles:
    """A distribution of positive numbers: log values [n] at rising normal scores [n].

    Between two scores the log runs straight (pieces of log-normals); beyond the ends it stays.
    """

    score: Array
    log_value: Array

    @classmethod
    def log_normal(cls, median: float, sigma: float, least: float, most: float) -> Self:
        """Return a log-normal whose draws are clipped to [least, most]."""
        if not (0.0 < least <= median <= most < inf and 0.0 <= sigma < inf):
            raise ValueError(
                f"a log-normal needs 0 < least <= median <= most and sigma >= 0, not"
                f" {least}, {median}, {most} and {sigma}"
            )
        if sigma == 0.0 or least == most:
            return cls(np.zeros(1), np.array([log(median)]))
        ends = np.array([log(least), log(most)])
        return cls((ends - log(median)) / sigma, ends)

    @classmethod
    def of_table(cls, levels: Sequence[float], values: Sequence[float]) -> Self:
        """Return the distribution whose quantiles at rising `levels` in (0, 1) are `values`."""
        value, level = np.asarray(values, float), np.asarray(levels, float)
        if value.ndim != 1 or value.shape != level.shape or not len(value):
            raise ValueError(f"{level.shape} levels do not go with {value.shape} quantiles")
        rising = (np.diff(level) > 0).all() and (np.diff(value) >= 0).all()
        if not (rising and value[0] > 0.0 and value[-1] < inf and 0.0 < level[0] <= level[-1] < 1):
            raise ValueError("quantiles must be above 0 and rise with levels between 0 and 1")
        return cls(np.array([NormalDist().inv_cdf(p) for p in levels]), np.log(value))

    @classmethod
    def of_sample(cls, values: Sequence[float] | Array) -> Self:
        """Return the distribution of positive values that were seen, at most 512 quantiles."""
        n = min(len(values), 512)
        if not n:
            raise ValueError("no values to take quantiles of; give at least one")
        levels = (np.arange(n) + 0.5) / n
        return cls.of_table(levels.tolist(), np.quantile(np.asarray(values, float), levels))

    def at(self, score: Array) -> Array:
        """Return the values f64 at standard normal scores."""
        found: Array = np.exp(np.interp(score, self.score, self.log_value))
        return found


def poisson(rate_per_s: float, seed: int) -> Times:
    """Return arrivals without memory."""
    return gamma(rate_per_s, 1.0, seed)


def gamma(rate_per_s: float, cv: float, seed: int) -> Times:
    """Return arrivals with gamma gaps of a coefficient of variation: above 1 bursty, below even."""
    if not (0.0 < rate_per_s < inf and 0.0 < cv < inf):
        raise ValueError(f"arrivals need a rate and a cv above 0, not {rate_per_s} and {cv}")
    shape = cv**-2
    scale = 1.0 / (rate_per_s * shape)
    return _summed(draws(seed, Stream.GAP, b).gamma(shape, scale, BLOCK) for b in count())


def correlated(gaps: Quantiles, correlation: float, memory: int, seed: int) -> Times:
    """Return arrivals whose gaps have the quantiles of a table, and come in spells.

    A gap's normal score is the sum of a slow part, which holds `correlation` of the variance and
    turns over every `memory` arrivals, and a part of its own (a Gaussian copula).
    """
    if not (0.0 <= correlation <= 1.0 and memory >= 1):
        raise ValueError(
            f"correlation must be from 0 to 1 and memory at least 1, not {correlation}, {memory}"
        )
    return _summed(gaps.at(_scores(correlation, memory, seed, b)) for b in count())


def _scores(correlation: float, memory: int, seed: int, block: int) -> Array:
    own = normals(seed, Stream.GAP, block * BLOCK, BLOCK)
    at = np.arange(block * BLOCK, (block + 1) * BLOCK)
    node, turn = at // memory, (at % memory) * (0.5 * np.pi / memory)
    nodes = normals(seed, Stream.SLOW, int(node[0]), int(node[-1] - node[0]) + 2)
    # Between two nodes the weights run along a circle, which keeps the variance at 1.
    slow = np.cos(turn) * nodes[node - node[0]] + np.sin(turn) * nodes[node - node[0] + 1]
    mixed: Array = np.sqrt(correlation) * slow + np.sqrt(1.0 - correlation) * own
    return mixed


def batches(period_s: float, sizes: Quantiles, seed: int) -> Times:
    """Return arrivals that come together, once each period, so many as `sizes` says."""
    if not 0.0 < period_s < inf:
        raise ValueError(f"the period must be above 0 s, not {period_s}")
    for block in count():
        drawn = sizes.at(normals(seed, Stream.GAP, block * BLOCK, BLOCK))
        at = period_s * np.arange(block * BLOCK, (block + 1) * BLOCK)
        yield np.repeat(at, np.rint(drawn).astype(np.int64))


def markov_modulated(rates_per_s: Sequence[float], dwell_s: Sequence[float], seed: int) -> Times:
    """Return Poisson arrivals whose rate jumps: a stay in each state, then any other state.

    Stays are exponential with the means `dwell_s`; the first state is drawn by its share of time,
    so the process starts as it goes on. Mean rate: sum(rate x dwell) / sum(dwell). Source: Fischer
    and Meier-Hellstern, "The Markov-modulated Poisson process cookbook" (1993).
    """
    rates, dwell = np.asarray(rates_per_s, float), np.asarray(dwell_s, float)
    if len(rates) < 2 or rates.shape != dwell.shape:
        raise ValueError(f"give two or more rates, a dwell each: {len(rates)} and {len(dwell)}")
    sound = np.isfinite(rates).all() and np.isfinite(dwell).all() and (dwell > 0.0).all()
    if not (sound and (rates >= 0.0).all() and rates.any()):
        raise ValueError(
            "rates must be 0 or more and not all 0, dwells above 0 s, not"
            f" {rates.tolist()} and {dwell.tolist()}"
        )
    return _stays(rates, dwell, seed)


def _stays(rates: Array, dwell: Array, seed: int) -> Times:
    time_s, states = 0.0, len(rates)
    state = int(draws(seed, Stream.DWELL, 0).choice(states, p=dwell / dwell.sum()))
    for stay in count(1):
        rng = draws(seed, Stream.DWELL, stay)
        end_s = time_s + dwell[state] * rng.exponential()
        while rates[state] and time_s < end_s:
            times = time_s + np.cumsum(rng.exponential(1.0 / rates[state], BLOCK))
            yield times[times < end_s]
            time_s = float(times[-1])
        time_s = end_s
        state = (state + 1 + int(rng.integers(states - 1))) % states


def _summed(gaps: Iterator[Array]) -> Times:
    time_s = 0.0
    for block in gaps:
        times = time_s + np.cumsum(block)
        time_s = float(times[-1])
        assert isfinite(time_s)
        yield times
