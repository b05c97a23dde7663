"""The fast loop's luck for training, drawn a block a step from one counter-based stream.

Of a request only its level and phase are kept: what lies beyond a rejection is never seen, so that
coins drawn anew have the same law. A phase may turn once within a draft, not twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

from parlay.policies.features import DEPTH
from parlay.policies.types import NGRAM, PROPOSERS, Array
from parlay.sim.kinds import POOL, Kind
from parlay.sim.latent import (
    COLD_FACTOR,
    COLD_TOKENS,
    CONFIDENCE_NOISE,
    COPULA,
    PHASE_TOKENS,
    match_length,
    place_log_odds,
)
from parlay.sim.laws import tasks

if TYPE_CHECKING:
    from parlay.sim.fast import FastLoop

_F32 = np.float32
_LEADING = np.array([f"{byte:08b}0".index("0") for byte in range(256)])
"""How many bits of a byte are set before the first that is not: DEPTH places are a byte."""


class BlockLuck:
    """Requests drawn from their kind's pool; a batch begins with each somewhere in its output.

    vary: how far acceptance differs between batches, in log-odds.
    """

    def __init__(self, kinds: Sequence[Kind], rows: int, vary: float) -> None:
        self.vary = vary
        self.names = tuple(dict.fromkeys(name for kind in kinds for name in kind.names))
        laws = [tasks()[name].law for name in self.names]
        self._odds = place_log_odds(laws, DEPTH).astype(_F32)
        self._match_rate = np.array([law.match_rate for law in laws], _F32)
        self._shift_sd = np.array([law.shift_sd for law in laws], _F32)
        self._phase = np.array([law.phase_shift for law in laws], _F32)
        self._bent = np.zeros((len(kinds), len(laws), PROPOSERS), _F32)
        self._own, self._high = np.zeros(rows, _F32), np.zeros(rows, bool)
        self._until = np.ones(rows, np.int64)
        self._coins = np.zeros((rows, DEPTH), _F32)
        self._pools(kinds)

    def _pools(self, kinds: Sequence[Kind]) -> None:
        """Lay the pools of all kinds beside one another: i64 [kinds, 4, POOL]."""
        unique = list({id(kind): kind for kind in kinds}.values())
        place = {id(kind): i for i, kind in enumerate(unique)}
        self._pool_of = np.array([place[id(kind)] for kind in kinds])
        index = {name: i for i, name in enumerate(self.names)}
        of_name = [np.array([index[name] for name in kind.names]) for kind in unique]
        self._pool = np.array(
            [
                (of[kind.task], kind.prompt_tokens, kind.output_tokens, kind.cached_tokens)
                for of, kind in zip(of_name, unique, strict=True)
            ]
        )

    def restart(self, loop: FastLoop, batches: Array, rows: Array) -> None:
        """Begin batches anew, with other laws and requests."""
        shape = (len(batches), *self._bent.shape[1:])
        self._bent[batches] = self.vary * loop.rng.standard_normal(shape)
        loop.begin(rows)
        share = loop.rng.random(len(rows))
        loop.output[rows] = 1 + (share * (loop.length[rows] - 1)).astype(np.int64)
        loop.pending[rows] = 0

    def begin(self, loop: FastLoop, rows: Array) -> Array:
        """Draw the requests that take `rows`; return all of them."""
        n, rng = len(rows), loop.rng
        drawn = self._pool[self._pool_of[loop.batch[rows]], :, rng.integers(0, POOL, n)]
        loop.task[rows], loop.prompt[rows], loop.length[rows], loop.cached[rows] = drawn.T
        self._own[rows] = self._shift_sd[loop.task[rows]] * rng.standard_normal(n, _F32)
        self._high[rows] = rng.random(n) < 0.5
        self._until[rows] = rng.geometric(1.0 / PHASE_TOKENS, n)
        return rows

    def flip(self, loop: FastLoop) -> None:
        """Draw the coins of a step."""
        self._coins = loop.rng.random((len(loop.batch), DEPTH), _F32)

    def held(self, loop: FastLoop, rows: Array, who: Array) -> Array:
        """Return how many of DEPTH tokens drafted now would hold."""
        return self._held(loop, rows, who, self._coins[rows])

    def guessed(self, loop: FastLoop, rows: Array) -> Array:
        """Return how many of the n-gram's guesses would hold, where others draft.

        Its coins hang together with those of who drafted, by a Gaussian copula.
        """
        single = loop.rng.standard_normal((len(rows), DEPTH), _F32)
        shared = ndtri(np.clip(self._coins[rows], _F32(1e-6), _F32(1.0 - 1e-6)))
        mixed = ndtr(_F32(COPULA) * shared + _F32(np.sqrt(1.0 - COPULA**2)) * single)
        return self._held(loop, rows, np.full(len(rows), NGRAM), mixed)

    def _held(self, loop: FastLoop, rows: Array, who: Array, coins: Array) -> Array:
        task = loop.task[rows]
        odds = self._odds[task, who] + self._shift(loop, rows)
        odds += self._bent[loop.batch[rows], task, who][:, None]
        cold = loop.output[rows, None] + np.arange(DEPTH) < COLD_TOKENS
        right = coins * (1.0 + np.exp(-odds)) < np.where(cold, _F32(COLD_FACTOR), _F32(1.0))
        return _LEADING[np.packbits(right, axis=1)[:, 0]]

    def _shift(self, loop: FastLoop, rows: Array) -> Array:
        """Return f32 [n, DEPTH]: each request's shift at the places of a draft that begins now."""
        high = self._high[rows, None] ^ (np.arange(DEPTH) >= self._until[rows, None])
        phase = self._phase[loop.task[rows], None]
        return self._own[rows, None] + np.where(high, phase, -phase)

    def move(self, loop: FastLoop, emitted: Array) -> None:
        """Let the phases go on for `emitted` i64 [rows] tokens."""
        self._until -= emitted
        turned = np.flatnonzero(self._until <= 0)
        while len(turned):
            self._high[turned] ^= True
            self._until[turned] += loop.rng.geometric(1.0 / PHASE_TOKENS, len(turned))
            turned = turned[self._until[turned] <= 0]

    def match(self, loop: FastLoop, decodes: Array) -> Array:
        """Return the n-gram's match lengths i32 [rows] at the positions of now."""
        rng = loop.rng
        found = np.flatnonzero(
            (rng.random(len(decodes), _F32) < self._match_rate[loop.task]) & decodes
        )
        task = loop.task[found]
        phase = self._phase[task]
        odds = self._odds[task, NGRAM, 0] + self._bent[loop.batch[found], task, NGRAM]
        odds += self._own[found] + np.where(self._high[found], phase, -phase)
        noise = CONFIDENCE_NOISE * rng.standard_normal(len(found), _F32)
        out = np.zeros(len(decodes), np.int32)
        out[found] = match_length(odds + noise)
        return out
