"""What a run of paired measurements says of a gain, at any time and as often as one looks.

Each measurement is a log-ratio of two blocks of steps that were run in random order, so its noise
is the difference of two like noises: symmetric about the true log-gain, however heavy its tails.
For symmetric noise exp(l s - l^2 v / 2) is a supermartingale, s the sum of y - m and v the sum of
its squares (de la Pena 1999; Howard, Ramdas, McAuliffe & Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", arXiv 1810.08240). Mixed over a half-normal l it gives their
one-sided normal mixture, which bounds m at every time at once, with no bound or variance assumed.
A change of the gain is found by Page's CUSUM of the residuals (Page 1954).
"""

from __future__ import annotations

import math

import numpy as np

from parlay.policies.types import Array

CLIP = 1.0
"""No log-ratio counts for more: a factor of 2.7."""
_RHO = 0.04
"""Tightest where the squares sum to .3, as some 20 pairs of 12% noise do."""
_BISECTIONS = 24
_DRIFT, _ALARM = 0.5, 5.0
"""CUSUM of standardised residuals: one false alarm in about 470 pairs (Siegmund 1985, two-sided),
and a shift of one sigma is found in about 10."""
_SETTLED = 4
_PRIOR_PAIRS, _FRESH_PAIRS, _MEMORY_PAIRS = 1.0, 3.0, 10.0
_SPREAD_START, _SPREAD_LEAST, _SPREAD_MEMORY = 0.02, 4e-4, 16.0


def log_capital(count: int, total: float, squares: float, mean: float) -> float:
    """Return the log of what a bet against `mean`, on the side the data lie, has grown to.

    count, total, squares: number, sum and sum of squares of the log-ratios. It reaches log(1/alpha)
    ever, while the true mean is `mean`, with a chance of at most alpha.
    """
    room = max(squares - 2.0 * mean * total + count * mean * mean, 0.0) + _RHO
    z = abs(total - count * mean) / math.sqrt(room)
    return 0.5 * math.log(_RHO / room) + 0.5 * z * z + math.log1p(math.erf(z / math.sqrt(2.0)))


def bounds(count: int, total: float, squares: float, alpha: float) -> tuple[float, float]:
    """Return the lower and the upper bound of the mean, each wrong ever with a chance of `alpha`.

    A bound that the data do not reach yet is infinite.
    """
    if not count:
        return -math.inf, math.inf
    return (
        _bound(count, total, squares, alpha, -2.0 * CLIP),
        _bound(count, total, squares, alpha, 2.0 * CLIP),
    )


def _bound(count: int, total: float, squares: float, alpha: float, far: float) -> float:
    wall, near = math.log(1.0 / alpha), total / count
    if log_capital(count, total, squares, far) < wall:
        return math.copysign(math.inf, far)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (near + far)
        if log_capital(count, total, squares, middle) < wall:
            near = middle
        else:
            far = middle
    return far


class GainSequence:
    """Log-gains since the last change: their bounds, the newest level, their spread, CUSUMs.

    recent: mean of the newest pairs, held at 0 by a few pairs that were not seen; spread: standard
    deviation of one pair, from neighbours' differences, so that a drift does not inflate it.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.count, self.total, self.squares = 0, 0.0, 0.0
        self.recent = 0.0
        self.lower, self.upper = -math.inf, math.inf
        self._variance, self._last = _SPREAD_START, math.nan
        self._up, self._down = 0.0, 0.0
        self._weight = _PRIOR_PAIRS

    @property
    def mean(self) -> float:
        """Mean since the last change; 0 before the first pair."""
        return self.total / self.count if self.count else 0.0

    @property
    def hopeful(self) -> float:
        """The newest level, raised while pairs are few, so that noise alone is no loss."""
        return self.recent + self.spread / self._weight

    @property
    def spread(self) -> float:
        """Standard deviation of a pair's log-ratio."""
        return math.sqrt(self._variance)

    def add(self, log_ratio: float) -> bool:
        """Learn one pair; return whether the gain has changed, in which case all starts anew."""
        y = min(max(log_ratio, -CLIP), CLIP)
        if math.isfinite(self._last):
            half = 0.5 * (y - self._last) ** 2
            self._variance += (min(half, 9.0 * self._variance) - self._variance) / _SPREAD_MEMORY
            self._variance = max(self._variance, _SPREAD_LEAST)
        self._last = y
        changed = self._changed(y)
        if changed:
            self.reset()
        else:
            # The pair that rang is not counted: it is extreme by selection.
            self.count += 1
            self.total += y
            self.squares += y * y
            self.lower, self.upper = bounds(self.count, self.total, self.squares, self.alpha)
        self._weight = min(self._weight + 1.0, _MEMORY_PAIRS)
        self.recent += (y - self.recent) / self._weight
        return changed

    def _changed(self, y: float) -> bool:
        if self.count < _SETTLED:
            return False
        z = (y - self.mean) / math.sqrt(self._variance * (1.0 + 1.0 / self.count))
        self._up = max(0.0, self._up + z - _DRIFT)
        self._down = max(0.0, self._down - z - _DRIFT)
        return max(self._up, self._down) > _ALARM

    def reset(self) -> None:
        """Forget what was before a change; the newest level and the spread stay."""
        self.count, self.total, self.squares = 0, 0.0, 0.0
        self.lower, self.upper = -math.inf, math.inf
        self._up, self._down = 0.0, 0.0
        self._weight = min(self._weight, _FRESH_PAIRS)

    def level(self) -> None:
        """Start anew from a gain of 1, for what brought one here was lucky by selection."""
        self.reset()
        self.recent = 0.0

    def state(self) -> Array:
        """Return everything as one vector."""
        head = [self.count, self.total, self.squares, self.recent]
        return np.array([*head, self._variance, self._last, self._up, self._down, self._weight])

    def load(self, state: Array) -> None:
        """Take a vector from `state()`; raises ValueError where its length does not fit."""
        if np.shape(state) != (9,):
            raise ValueError(f"a gain sequence needs 9 numbers, not {np.shape(state)}")
        count, self.total, self.squares, self.recent, *rest = (float(v) for v in state)
        self.count = int(count)
        self._variance, self._last, self._up, self._down, self._weight = rest
        self.lower, self.upper = bounds(self.count, self.total, self.squares, self.alpha)
