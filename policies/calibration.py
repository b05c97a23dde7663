"""From a drafter's confidence in a place, before its token is drawn, to P(the token is accepted).

sigmoid(slope * log-odds(confidence) + offset) for each proposer that has confidences, fitted online
by Newton's method to what was verified, with a Gaussian prior on (1, 0): the confidence taken at
its word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from parlay.policies.types import DRAFT_MODEL, MEDUSA, PROPOSERS, Array, StepOutcome

CALIBRATED = (DRAFT_MODEL, MEDUSA)
"""The proposers that say how sure they are of a place."""
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
    """Slope and offset of every proposer with confidences, from its newest verified places."""

    def __init__(self) -> None:
        self._curves = {proposer: _Curve() for proposer in CALIBRATED}
        self._table = np.zeros((PROPOSERS, 2), np.float32)
        self._tabulate()

    def trusts(self, proposers: Array) -> bool:
        """Say whether a confidence may end a draft where these proposers draft.

        That is where one of them has confidences, and enough was seen of all that have.
        """
        drafting = [c for p, c in self._curves.items() if (proposers == p).any()]
        return bool(drafting) and all(curve.fitted_at > 0 for curve in drafting)

    def coefficients(self) -> Array:
        """Return f32 [PROPOSERS, 2] for the plan; the prior's where nothing was fitted."""
        return self._table

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from each place that was reached, by whether its token held."""
        if len(outcome) == 1:
            only = self._curves.get(int(outcome.proposer[0]))
            if only is not None and only.learn(*_reached_by_one(outcome)):
                self._tabulate()
            return
        refit = False
        for proposer, curve in self._curves.items():
            rows = ((outcome.proposer == proposer) & (outcome.verified_k > 0)).nonzero()[0]
            if len(rows):
                refit |= curve.learn(*_reached(outcome, rows))
        if refit:
            self._tabulate()

    def _tabulate(self) -> None:
        table = np.tile(_PRIOR, (PROPOSERS, 1)).astype(np.float32)
        for proposer, curve in self._curves.items():
            table[proposer] = curve.fit
        self._table = table

    def state(self) -> dict[str, Array]:
        """Return everything that later estimates depend on, by proposer of CALIBRATED."""
        curves = self._curves.values()
        return {
            "odds": np.stack([c.odds for c in curves]),
            "held": np.stack([c.held for c in curves]),
            "counts": np.array([[c.count, c.fitted_at] for c in curves]),
            "fit": np.stack([c.fit for c in curves]),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit.

        One that knows the draft model alone, without an axis of proposers, leaves the others new.
        """
        names = ("odds", "held", "counts", "fit")
        if not set(names) <= set(state):
            raise ValueError("the calibration's state is incomplete")
        odds, held, counts, fit = (np.atleast_2d(np.asarray(state[name])) for name in names)
        known, most = len(odds), len(CALIBRATED)
        shapes = [(known, _WINDOW)] * 2 + [(known, 2)] * 2
        if known not in (1, most) or [a.shape for a in (odds, held, counts, fit)] != shapes:
            raise ValueError("the calibration's state is of another version")
        for row, proposer in enumerate(CALIBRATED):
            curve = self._curves[proposer] = _Curve()
            if row < known:
                curve.odds, curve.held = odds[row].astype(float), held[row].astype(float)
                curve.count, curve.fitted_at = (int(v) for v in counts[row])
                curve.fit = fit[row].astype(float)
        self._tabulate()


class _Curve:
    """One proposer's newest places: log-odds of its confidence, and 1 where the token held."""

    def __init__(self) -> None:
        self.odds, self.held = np.zeros(_WINDOW), np.zeros(_WINDOW)
        self.count = self.fitted_at = 0
        self.fit = _PRIOR.copy()

    def learn(self, odds: Array | list[float], held: Array | list[float]) -> bool:
        """Keep places; return whether slope and offset were fitted anew."""
        at = self.count % _WINDOW
        if at + len(odds) <= _WINDOW:
            self.odds[at : at + len(odds)], self.held[at : at + len(odds)] = odds, held
        else:
            where = (at + np.arange(len(odds))) % _WINDOW
            self.odds[where], self.held[where] = odds, held
        self.count += len(odds)
        if due := self.count - self.fitted_at >= _REFIT_EVERY:
            self._refit()
        return due

    def _refit(self) -> None:
        n = min(self.count, _WINDOW)
        x = np.stack([self.odds[:n], np.ones(n)], axis=1)
        w = self.fit
        for _ in range(3):
            p = 1.0 / (1.0 + np.exp(-np.clip(x @ w, -30.0, 30.0)))
            slope = x.T @ (p - self.held[:n]) + _PRIOR_PRECISION * (w - _PRIOR)
            curve = (x * (p * (1.0 - p))[:, None]).T @ x + np.diag(_PRIOR_PRECISION)
            w = w - np.clip(np.linalg.solve(curve, slope), -1.0, 1.0)
        # A confidence that counts against itself is noise.
        self.fit = np.array([max(w[0], 0.0), w[1]])
        self.fitted_at = self.count


def _reached_by_one(outcome: StepOutcome) -> tuple[list[float], list[float]]:
    """Return what `_reached` does of a step of one row, whose arrays would be mostly overhead."""
    accepted, verified = int(outcome.accepted[0]), int(outcome.verified_k[0])
    confidence = outcome.confidences[0, : min(accepted + 1, verified)].tolist()
    inside = [min(max(c, _EDGE), 1.0 - _EDGE) for c in confidence if math.isfinite(c)]
    held = [float(j < accepted) for j, c in enumerate(confidence) if math.isfinite(c)]
    return [math.log(c / (1.0 - c)) for c in inside], held


def _reached(outcome: StepOutcome, rows: Array) -> tuple[Array, Array]:
    """Return log-odds and 1.0 or 0.0, held or not, of the places of rows that were reached."""
    confidence = outcome.confidences[rows]
    place = np.arange(confidence.shape[1])
    accepted, verified = outcome.accepted[rows, None], outcome.verified_k[rows, None]
    reached = (place <= accepted) & (place < verified) & np.isfinite(confidence)
    return log_odds(confidence[reached]), (place < accepted)[reached].astype(float)
