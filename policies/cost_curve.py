"""What a pass takes by its tokens, learned from few steps: a Gaussian process on a coarse scale.

A pass takes f(tokens) + f(1) (kv * KV read + pad * padding). log f is a prior shape plus a smooth
unknown (Ornstein-Uhlenbeck in the logarithm of the tokens: what one count shows says most of its
neighbours). All of it is kept by mean and covariance and brought up to date a step at a time, by an
extended Kalman filter. Where nothing was seen one step is nearly believed; where much was, a spike
is not. So a knee costs a few steps to find, not dozens, and a shared machine's spikes move nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from parlay.policies.types import Array

EDGES = np.array(
    [
        *(1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512),
        *(768, 1024, 1536, 2048),
    ]
)
_LOG_EDGES = np.log(EDGES)
_EDGE_OF, _LOG_EDGE_OF = EDGES.tolist(), _LOG_EDGES.tolist()
_N = len(EDGES)
_SLOPE, _SLOPE_SD = 0.5 / 32.0, 0.5
"""A token takes so much of a step of none, known to a factor of about e to the sd."""
_EXTRA, _EXTRA_SD = (0.2, 0.02), (0.2, 0.1)
"""What KV_UNIT of KV read and TOKENS_UNIT tokens of padding take of a step of one token."""
_SD, _REACH = 0.3, 1.4
_UNIT_SD, _UNIT_DRIFT_SD = 5.0, 0.15
_NOISE = 0.06
_DRIFT, _FORGET, _AGE_EACH = 5e-6, 5e-5, 8
"""A machine's pace changes, its shape hardly does: a count that is seen in every step is known from
about its last thirty, one that is not follows the others' pace."""
_STEEPEST = 100.0
"""Where what KV would take is so many times the step's own time, no digit of it means much."""
_SPIKES = 0.05 / 3.0
"""Density of steps that took longer for a reason of the machine's own: one in twenty, by up to a
factor of twenty. None is shorter for such a reason."""
_ODD, _ODD_RUN, _WRONG, _DOUBT = 2.0, 4, -4.0, 0.5
"""So many steps in a row so many standard deviations off, to one side, are no spikes, nor is one
that is that much too short: the machine has changed, or a spike was believed, and half of what is
known is doubted."""


def _prior(unit_sd: float) -> Array:
    near = np.exp(-np.abs(_LOG_EDGES[:, None] - _LOG_EDGES) / _REACH)
    by_slope = _SLOPE * EDGES / (1.0 + _SLOPE * EDGES)
    cov = np.diag([0.0] * _N + [sd**2 for sd in _EXTRA_SD])
    cov[:_N, :_N] = unit_sd**2 + np.outer(by_slope, by_slope) * _SLOPE_SD**2 + _SD**2 * near
    return cov


_SETTLED = _prior(_UNIT_DRIFT_SD)
_PACE = np.zeros((_N + 2, _N + 2))
_PACE[:_N, :_N] = _DRIFT


class Curve:
    """log f at EDGES, then kv and pad: mean f64 [edges + 2], cov f64 [edges + 2, edges + 2].

    seen f64 [edges]: steps at each; reach: the least and the most of EDGES that were seen.
    """

    def __init__(self) -> None:
        self.mean: Array = np.concatenate([np.log(1.0 + _SLOPE * EDGES), _EXTRA])
        self.cov: Array = _prior(_UNIT_SD)
        self.seen: Array = np.zeros(_N)
        self.reach: tuple[float, float] = (math.inf, 0.0)
        self._odd = self._steps = 0

    def add(self, tokens: float, kv: float, pads: float, ms: float) -> float:
        """Learn from a step of 1 token or more; kv and pads in their units.

        Return its time without what KV and padding took.
        """
        at, share = _place(tokens)
        tilt, alone_ms, expected = self._tilt(at, share, tokens, kv, pads)
        alone, miss = alone_ms / expected, math.log(ms / expected)
        row = self.cov @ tilt
        known = max(float(row @ tilt), 0.0)
        z = miss / math.sqrt(known + _NOISE**2)
        self._odd = self._odd + (1 if z > 0 else -1) if abs(z) > _ODD else 0
        if z < _WRONG or abs(self._odd) >= _ODD_RUN:
            self.cov += _DOUBT * (_SETTLED - self.cov)
            self._odd = 0
            row = self.cov @ tilt
            known = max(float(row @ tilt), 0.0)
        variance = known + _NOISE**2 / _trust(miss, known + _NOISE**2)
        self.mean += row * (miss / variance)
        self.cov -= row[:, None] * (row / variance)
        self._steps += 1
        if self._steps % _AGE_EACH == 0:
            self.cov += _AGE_EACH * (_FORGET * (_SETTLED - self.cov) + _PACE)
        near = at + (share > 0.5)
        self.seen[near] += 1.0
        self.reach = min(self.reach[0], _EDGE_OF[near]), max(self.reach[1], _EDGE_OF[near])
        return ms * alone

    def _tilt(
        self, at: int, share: float, tokens: float, kv: float, pads: float
    ) -> tuple[Array, float, float]:
        """Return how the logarithm of a step's time goes with each of `mean`; the time without what
        KV and padding take, and with it.
        """  # noqa: D205
        unit = math.exp(self.mean[0])
        alone = self.one_ms(tokens)
        extra = unit * (kv * self.kv + pads * self.pad)
        ms = alone + extra
        tilt = np.zeros(_N + 2)
        tilt[at], tilt[at + 1] = (1.0 - share) * alone / ms, share * alone / ms
        tilt[0] += extra / ms
        tilt[_N:] = min(unit * kv / ms, _STEEPEST), min(unit * pads / ms, _STEEPEST)
        return tilt, alone, ms

    @property
    def kv(self) -> float:
        """Return what a unit of KV takes of a step of one token."""
        return max(float(self.mean[_N]), 0.0)

    @property
    def pad(self) -> float:
        """Return what a unit of padding takes of a step of one token."""
        return max(float(self.mean[_N + 1]), 0.0)

    @property
    def unit_ms(self) -> float:
        """Return the time of a step of one token that reads nothing."""
        return math.exp(self.mean[0])

    def ms(self, tokens: Array) -> Array:
        """Return f of `tokens`, ascending; beyond the last edge in proportion."""
        found = np.exp(np.interp(np.log(np.maximum(tokens, 1)), _LOG_EDGES, self.mean[:_N]))
        beyond = int(tokens.searchsorted(_EDGE_OF[-1]))
        found[beyond:] *= tokens[beyond:] / _EDGE_OF[-1]
        return found

    def one_ms(self, tokens: float) -> float:
        """Return `ms` of one number of tokens, 1 or more, without arrays."""
        at, share = _place(tokens)
        low, high = self.mean.item(at), self.mean.item(at + 1)
        beyond = max(tokens / _EDGE_OF[-1], 1.0)
        return float(beyond * math.exp(low + share * (high - low)))

    def state(self) -> dict[str, Array]:
        """Return everything that later times depend on."""
        seen = np.concatenate([self.seen, [self._odd, self._steps]])
        return {"curve": np.concatenate([self.mean[None], seen[None], self.cov])}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        curve = np.asarray(state["curve"], float)
        if curve.shape != (_N + 4, _N + 2):
            raise ValueError("the cost state is of another version")
        self.mean, self.cov = curve[0].copy(), curve[2:].copy()
        self.seen = curve[1, :_N].copy()
        seen = EDGES[self.seen > 0.0].tolist()
        self.reach = (seen[0], seen[-1]) if seen else (math.inf, 0.0)
        self._odd, self._steps = (int(n) for n in curve[1, _N:])


def _trust(miss: float, variance: float) -> float:
    """Return the chance that a step whose log is `miss` too long is no spike, above 0."""
    if miss <= 0.0:
        return 1.0
    usual = math.exp(-0.5 * min(miss**2 / variance, 60.0)) / math.sqrt(2.0 * math.pi * variance)
    return usual / (usual + _SPIKES)


def _place(tokens: float) -> tuple[int, float]:
    """Return the edge at or below `tokens`, and how far in its logarithm it is to the next."""
    at = min(bisect_right(_EDGE_OF, tokens) - 1, _N - 2)
    start, end = _LOG_EDGE_OF[at : at + 2]
    return at, min((math.log(tokens) - start) / (end - start), 1.0)
