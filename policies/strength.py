"""How far requests' own records are believed: the strength of the prior of their frailties.

With a prior of strength a and a task's level y, a request with R rejections of E expected has the
frailty z = (a y + R) / (a + E): a is large where requests are alike, small where they are unlike.
Rejections less z * hazard have a mean of 0 for the right a alone; with one too small they lean
against R - y E. So log a follows the score of the Poisson likelihood, d log z / d log a times what
was not foretold, in natural-gradient steps (Amari 1998): over the information gathered, which
fades.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from parlay.policies.types import PROPOSERS, Array

REQUEST_STRENGTH = 3.5
"""Before anything is learned. With the shipped draft on five kinds of text strengths of 2.5 to 10
foretold the next rejection best."""
LEAST_STRENGTH, MOST_STRENGTH = 0.5, 60.0
_PRIOR_INFORMATION = 4.0
"""As if the start were known to a factor of 1.6, which some 300 drafts say as well."""
_HALF_LIFE_DRAFTS = 3000.0
_FADE = 0.5 ** (1.0 / _HALF_LIFE_DRAFTS)
_EXPECTED = 5.0
_PACE = 0.01
"""Of a draft in the mean of what was expected of requests that draft."""


Number = TypeVar("Number", float, Array)


def lean(strength: Number, level: Number, rejected: Number, expected: Number) -> Number:
    """Return d log z / d log a, in [-1, 1]: which way a stronger prior moves the frailty."""
    toward: Number = strength * (level * expected - rejected)
    found: Number = toward / ((strength + expected) * (strength * level + rejected))
    return found


class Strength:
    """strength f64 [PROPOSERS]; expected f64 [PROPOSERS]: a drafting request's mean E."""

    def __init__(self) -> None:
        self.of = np.full(PROPOSERS, REQUEST_STRENGTH)
        self.expected = np.full(PROPOSERS, _EXPECTED)
        self._information = np.zeros(PROPOSERS)

    def learn_one(
        self, proposer: int, leans: float, excess: float, foretold: float, expected: float
    ) -> None:
        """Learn from a draft: its lean, rejections beyond those foretold, those, and its E."""
        information = _FADE * float(self._information[proposer]) + leans * leans * foretold
        self._information[proposer] = information
        step = leans * excess / (_PRIOR_INFORMATION + information)
        moved = float(self.of[proposer]) * math.exp(step)
        self.of[proposer] = min(max(moved, LEAST_STRENGTH), MOST_STRENGTH)
        self.expected[proposer] += _PACE * (expected - float(self.expected[proposer]))

    def learn(
        self, proposer: Array, leans: Array, excess: Array, foretold: Array, expected: Array
    ) -> None:
        """Learn from drafts [n] at once, as `learn_one` from each."""
        drafts = np.bincount(proposer, minlength=PROPOSERS)
        score = np.bincount(proposer, leans * excess, PROPOSERS)
        self._information *= _FADE**drafts
        self._information += np.bincount(proposer, leans * leans * foretold, PROPOSERS)
        moved = self.of * np.exp(score / (_PRIOR_INFORMATION + self._information))
        self.of = np.minimum(np.maximum(moved, LEAST_STRENGTH), MOST_STRENGTH)
        mean = np.bincount(proposer, expected, PROPOSERS) / np.maximum(drafts, 1)
        self.expected += (1.0 - (1.0 - _PACE) ** drafts) * (mean - self.expected)

    def state(self) -> Array:
        """Return f64 [3, PROPOSERS], everything that later estimates depend on."""
        return np.stack([self.of, self.expected, self._information])

    def load(self, state: Array) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if np.shape(state) != (3, PROPOSERS):
            raise ValueError(
                f"a strength's state has the shape {(3, PROPOSERS)}, not {np.shape(state)}"
            )
        self.of, self.expected, self._information = np.array(state, float)
