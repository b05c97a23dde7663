"""How well a fitted model of acceptance says what was logged.

By place and by run length: each draft is foretold from what its text showed before it, so that the
figures hold for logs of policies that choose k by what they saw (as assisted generation does).
Between texts and from draft to draft: the simulator is run at the logged positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.policies.types import Array
from parlay.sim.acceptance_fit import Model, law_of, predicted
from parlay.sim.acceptance_log import DEPTH, Observed
from parlay.sim.latent import COLD_TOKENS, Latents

SIMULATIONS = 20
FEWEST_IN_TEXT = 8
"""Texts with fewer drafts say too little of how texts differ."""
_MOST_TEXTS = 400


@dataclass(slots=True, frozen=True)
class Against:
    """A figure as logged, and in `SIMULATIONS` simulations: mean, least, most."""

    observed: float
    simulated: float
    least: float
    most: float

    @property
    def inside(self) -> bool:
        """Say whether what was logged lies within what was simulated."""
        return self.least <= self.observed <= self.most


@dataclass(slots=True, frozen=True)
class Goodness:
    """One proposer of one task.

    By place [DEPTH]: drafts that came to it (reached), of them observed and foretold shares that
    held, nan none; z of their difference. By run length [DEPTH + 1]: drafts with so many tokens
    held, logged and foretold. rates f64 [texts]: share of first tokens that held, logged and in the
    simulations [SIMULATIONS, texts]; spread: its standard deviation between texts; memory: its
    correlation from draft to draft of a text.
    """

    proposer: int
    reached: Array
    observed: Array
    foretold: Array
    z: Array
    runs: Array
    runs_foretold: Array
    rates: Array
    rates_simulated: Array
    spread: Against
    memory: Against


def goodness(model: Model, observed: Observed) -> list[Goodness]:
    """Return how well a model says each proposer's drafts."""
    belief = predicted(model, observed)
    chance, text = model.chance(), observed.text
    found = []
    for index, proposer in enumerate(model.proposers):
        mine = np.flatnonzero(observed.proposer == proposer)
        survival = _survival(chance[:, index], belief[mine], observed.at[mine])
        held, offered = observed.held[mine], observed.offered[mine]
        reached, share, foretold, z = _by_place(survival, held, offered)
        runs, hoped = _by_run(survival, held, offered)
        right = _simulated(model, observed, proposer, mine)
        rates, simulated, spread, memory = _between(text[mine], held > 0, right)
        found.append(
            Goodness(
                *(proposer, reached, share, foretold, z, runs, hoped),
                *(rates, simulated),
                spread=spread,
                memory=memory,
            )
        )
    return found


def _survival(chance: Array, belief: Array, at: Array) -> Array:
    """Return f64 [drafts, DEPTH + 1]: P(the first j tokens hold), as foretold."""
    out = np.ones((len(at), DEPTH + 1))
    cold = np.minimum(at, COLD_TOKENS)
    for c in range(COLD_TOKENS + 1):
        which = cold == c
        out[which, 1:] = belief[which] @ np.cumprod(chance[c], axis=1)
    return out


def _by_place(survival: Array, held: Array, offered: Array) -> tuple[Array, Array, Array, Array]:
    place = np.arange(DEPTH)
    came = (place <= held[:, None]) & (place < offered[:, None])
    chance = survival[:, 1:] / np.maximum(survival[:, :-1], 1e-12)
    reached, right = came.sum(axis=0), (came & (place < held[:, None])).sum(axis=0)
    hoped = (came * chance).sum(axis=0)
    wide = np.sqrt((came * chance * (1.0 - chance)).sum(axis=0))
    there = np.where(reached > 0, reached, np.nan)
    z = np.divide(right - hoped, wide, out=np.full(DEPTH, np.nan), where=wide > 0)
    return reached, right / there, hoped / there, z


def _by_run(survival: Array, held: Array, offered: Array) -> tuple[Array, Array]:
    run = np.arange(DEPTH + 1)
    ends = survival.copy()
    ends[:, :-1] -= survival[:, 1:]
    ends = np.where(run == offered[:, None], survival, np.where(run < offered[:, None], ends, 0.0))
    return np.bincount(held, minlength=DEPTH + 1), ends.sum(axis=0)


def _simulated(model: Model, observed: Observed, proposer: int, mine: Array) -> Array:
    """Return bool [SIMULATIONS, drafts]: does the first token hold, of other luck."""
    law, depth = law_of(model, 0.0), 1
    text = observed.text
    last = np.zeros(len(observed.first), np.int64)
    np.maximum.at(last, text, observed.at)
    kept = text[mine] < _MOST_TEXTS
    out = np.zeros((SIMULATIONS, len(mine)), bool)
    for seed in range(SIMULATIONS):
        latents = Latents([law], depth, seed)
        tokens = (last[:_MOST_TEXTS] + 1).tolist()
        rows = np.array([latents.admit(i, 0, n) for i, n in enumerate(tokens)], np.intp)
        at = observed.at[mine[kept]]
        out[seed, kept] = latents.held(rows[text[mine[kept]]], at, proposer) > 0
    return out


def _between(text: Array, right: Array, simulated: Array) -> tuple[Array, Array, Against, Against]:
    size = np.bincount(text)
    enough = np.flatnonzero((size >= FEWEST_IN_TEXT) & (np.arange(len(size)) < _MOST_TEXTS))
    follows = np.flatnonzero((text[1:] == text[:-1]) & np.isin(text[1:], enough))

    def figures(held: Array) -> tuple[Array, float, float]:
        rate = np.bincount(text, held, minlength=len(size)) / np.maximum(size, 1)
        rest = held - rate[text]
        both = (rest[follows] * rest[follows + 1]).mean() if len(follows) else np.nan
        of = (rest[follows] ** 2).mean() if len(follows) else np.nan
        spread = float(rate[enough].std()) if len(enough) > 1 else float("nan")
        return rate[enough], spread, float(both / of) if of else float("nan")

    logged = figures(right.astype(float))
    others = [figures(held.astype(float)) for held in simulated]
    spread = _against(logged[1], [other[1] for other in others])
    memory = _against(logged[2], [other[2] for other in others])
    return logged[0], np.stack([other[0] for other in others]), spread, memory


def _against(observed: float, simulated: list[float]) -> Against:
    return Against(observed, float(np.mean(simulated)), min(simulated), max(simulated))
