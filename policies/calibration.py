"""From a drafter's confidence in a place, before its token is drawn, to P(the token is accepted).

sigmoid(slope * log-odds(confidence) + offset), fitted online by Newton's method to what was
verified, with a Gaussian prior on (1, 0): the confidence taken at its word.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parlay.policies.types import DRAFT_MODEL, PROPOSERS, Array, StepOutcome

_EDGE = 1e-4
_WINDOW = 1024
_REFIT_EVERY = 32
_PRIOR = np.array([1.0, 0.0])
_PRIOR_PRECISION = np.array([20.0, 10.0])


def log_odds(confidence: Array) -> Array:
    """Return the log-odds of probabilities, kept away from 0 and 1."""
    inside = np.minimum(np.maximum(confidence, _EDGE), 1.0 - _EDGE)
    odds: Array = np.log(inside / (1.0 - inside))
    return odds


def calibrated(confidence: Array, slope: Array | float, offset: Array | float) -> Array:
    """Return acceptance probabilities; nan stays nan."""
    estimate: Array = 1.0 / (1.0 + np.exp(-(slope * log_odds(confidence) + offset)))
    return estimate


class Calibration:
    """Slope and offset of the draft model, from its newest verified places."""

    def __init__(self) -> None:
        self._odds, self._held = np.zeros(_WINDOW), np.zeros(_WINDOW)
        self._count, self._fitted_at = 0, 0
        self._fit = _PRIOR.copy()
        self._table = _table(self._fit)

    @property
    def trusted(self) -> bool:
        """Say whether enough was seen to let a confidence end a draft."""
        return self._fitted_at > 0

    def coefficients(self) -> Array:
        """Return f32 [PROPOSERS, 2] for the plan."""
        return self._table

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from each place of the draft model that was reached, by whether its token held."""
        rows = ((outcome.proposer == DRAFT_MODEL) & (outcome.verified_k > 0)).nonzero()[0]
        if not len(rows):
            return
        confidence = outcome.confidences[rows]
        place = np.arange(confidence.shape[1])
        accepted, verified = outcome.accepted[rows, None], outcome.verified_k[rows, None]
        reached = (place <= accepted) & (place < verified) & np.isfinite(confidence)
        self._keep(log_odds(confidence[reached]), (place < accepted)[reached].astype(float))
        if self._count - self._fitted_at >= _REFIT_EVERY:
            self._refit()

    def _keep(self, odds: Array, held: Array) -> None:
        at = (self._count + np.arange(len(odds))) % _WINDOW
        self._odds[at], self._held[at] = odds, held
        self._count += len(odds)

    def _refit(self) -> None:
        n = min(self._count, _WINDOW)
        x = np.stack([self._odds[:n], np.ones(n)], axis=1)
        w = self._fit
        for _ in range(3):
            p = 1.0 / (1.0 + np.exp(-np.clip(x @ w, -30.0, 30.0)))
            slope = x.T @ (p - self._held[:n]) + _PRIOR_PRECISION * (w - _PRIOR)
            curve = (x * (p * (1.0 - p))[:, None]).T @ x + np.diag(_PRIOR_PRECISION)
            w = w - np.clip(np.linalg.solve(curve, slope), -1.0, 1.0)
        # A confidence that counts against itself is noise.
        self._fit = np.array([max(w[0], 0.0), w[1]])
        self._table = _table(self._fit)
        self._fitted_at = self._count

    def state(self) -> dict[str, Array]:
        """Return everything that later estimates depend on."""
        counts = np.array([self._count, self._fitted_at])
        return {
            "odds": self._odds.copy(),
            "held": self._held.copy(),
            "counts": counts,
            "fit": self._fit,
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if not set(self.state()) <= set(state) or np.shape(state["odds"]) != (_WINDOW,):
            raise ValueError("the calibration's state is incomplete or of another version")
        self._odds, self._held = np.array(state["odds"]), np.array(state["held"])
        self._count, self._fitted_at = (int(v) for v in state["counts"])
        self._fit = np.array(state["fit"])
        self._table = _table(self._fit)


def _table(fit: Array) -> Array:
    """Return f32 [PROPOSERS, 2]: the draft model's slope and offset, the prior's elsewhere."""
    table = np.tile(_PRIOR, (PROPOSERS, 1)).astype(np.float32)
    table[DRAFT_MODEL] = fit
    return table
