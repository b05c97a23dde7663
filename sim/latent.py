"""What would be accepted, before anyone drafts: each request's luck, drawn when it is admitted.

Every number is drawn from a counter-based generator keyed by (seed, request), so that policies that
differ meet the same requests, the same phases and the same coins. A coin belongs to an output
position: a hard token is hard wherever a draft that reaches it began. The process: conditional
acceptance by place in the draft, on the log-odds scale shifted by the request (normal) and by its
phase (a two-state chain along the output); coins of the proposers at one position are coupled by a
Gaussian copula; the first outputs after a prompt accept at half their rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import expit, logit, ndtr

from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, PROPOSERS, Array

PHASE_TOKENS = 60.0
"""Mean length of a phase."""
COPULA = 0.4
"""Correlation of the proposers' coins at one position."""
CONFIDENCE_NOISE = 1.0
"""Standard deviation, in log-odds, of a drafter's confidence about the true acceptance."""
COLD_TOKENS, COLD_FACTOR = 2, 0.5
_DRAFTERS = (NGRAM, DRAFT_MODEL, MEDUSA)
_MATCH_SCALE, _MATCH_SLOPE, _LONGEST_MATCH = 4.0, 0.5, 32
_TINY = 1e-6


@dataclass(slots=True, frozen=True)
class TaskLaw:
    """How one task accepts.

    accept: conditional acceptance by place for each proposer, the last value repeating; match_rate:
    share of positions at which the n-gram finds a match; shift_sd and phase_shift: log-odds;
    cold_factor: of acceptance at the first COLD_TOKENS outputs.
    """

    match_rate: float
    accept: Mapping[int, Sequence[float]]
    shift_sd: float
    phase_shift: float
    cold_factor: float = COLD_FACTOR


class Luck(Protocol):
    """What the simulator's backend asks of a request's luck: drawn here, or recorded.

    match i32 [rows, positions]: the n-gram's match length.
    """

    depth: int
    match: Array

    def admit(self, request: int, task: int, tokens: int) -> int:
        """Return the row of request number `request`."""
        ...

    def release(self, row: int) -> None:
        """Give a row back."""
        ...

    def offered(self, rows: Array, output_tokens: Array, proposer: Array | int) -> Array:
        """Return i32 [n]: how many tokens could be drafted now."""
        ...

    def held(self, rows: Array, output_tokens: Array, proposer: Array | int) -> Array:
        """Return i32 [n]: how many of them would hold."""
        ...

    def confidence(self, rows: Array, output_tokens: Array, proposer: Array) -> Array:
        """Return f32 [n, depth]: the drafter's confidences, nan where there are none."""
        ...


class Latents:
    """The luck of the requests that run, a row each; rows are taken and given back.

    depth: the most tokens drafted in a step. Tasks are named by their index in `laws`.
    """

    def __init__(self, laws: Sequence[TaskLaw], depth: int, seed: int) -> None:
        self.depth, self.seed = depth, seed
        self.laws = list(laws)
        self.log_odds = place_log_odds(laws, depth)
        self._cold = np.array([law.cold_factor for law in laws])
        self._free: list[int] = []
        self._grow(64, 256)

    def admit(self, request: int, task: int, tokens: int) -> int:
        """Draw request number `request`, which will emit `tokens`; return its row."""
        length = tokens + self.depth
        if not self._free or length > self.shift.shape[1]:
            self._grow(2 * len(self.task), max(self.shift.shape[1], 2 * length))
        row = self._free.pop()
        law = self.laws[task]
        draw = np.random.Generator(np.random.Philox(key=[self.seed, request]))
        own = law.shift_sd * draw.standard_normal()
        start, turns = draw.random() < 0.5, draw.random(length) < 1.0 / PHASE_TOKENS
        high = (np.cumsum(turns) + start) % 2 == 1
        shift = own + np.where(high, law.phase_shift, -law.phase_shift)
        shared = draw.standard_normal(length)
        single = draw.standard_normal((len(_DRAFTERS), length))
        coins = ndtr(np.sqrt(COPULA) * shared + np.sqrt(1.0 - COPULA) * single)
        matched = draw.random(length) < law.match_rate
        noise = CONFIDENCE_NOISE * draw.standard_normal((PROPOSERS, length))
        self.task[row], self.shift[row, :length] = task, shift
        self.coin[row][list(_DRAFTERS), :length] = coins
        self.noise[row, :, :length] = noise
        seen = self.log_odds[task, NGRAM, 0] + shift + noise[NGRAM]
        self.match[row, :length] = matched * match_length(seen)
        return row

    def release(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def chance(self, rows: Array, output_tokens: Array, proposer: Array | int) -> Array:
        """Return f64 [n, depth]: P(place j holds | reached) of drafts that begin now."""
        at = output_tokens[:, None] + np.arange(self.depth)
        return self._chance(rows, at, self.shift[rows[:, None], at], proposer)

    def survival_now(self, rows: Array, output_tokens: Array) -> Array:
        """Return f64 [n, PROPOSERS, depth]: P(first j hold) as the phase of now would have it.

        What comes after this position, a new phase included, is not looked at.
        """
        at = output_tokens[:, None] + np.arange(self.depth)
        now = np.repeat(self.shift[rows, output_tokens][:, None], self.depth, 1)
        out = np.zeros((len(rows), PROPOSERS, self.depth))
        for proposer in _DRAFTERS:
            out[:, proposer] = np.cumprod(self._chance(rows, at, now, proposer), axis=1)
        out[:, NGRAM] *= (self.match[rows, output_tokens] > 0)[:, None]
        return out

    def offered(self, rows: Array, output_tokens: Array, proposer: Array | int) -> Array:
        """Return i32 [n]: how many tokens could be drafted now."""
        return np.full(len(rows), self.depth, np.int32)

    def held(self, rows: Array, output_tokens: Array, proposer: Array | int) -> Array:
        """Return i32 [n]: how many of `depth` tokens drafted now would hold."""
        at = output_tokens[:, None] + np.arange(self.depth)
        who = np.broadcast_to(np.asarray(proposer), rows.shape)
        coins = self.coin[rows[:, None], who[:, None], at]
        right = coins < self.chance(rows, output_tokens, proposer)
        run: Array = np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)
        return run

    def confidence(self, rows: Array, output_tokens: Array, proposer: Array) -> Array:
        """Return f32 [n, depth]: noisy log-odds of the true acceptance, as a probability."""
        at = output_tokens[:, None] + np.arange(self.depth)
        true = np.clip(self.chance(rows, output_tokens, proposer), _TINY, 1.0 - _TINY)
        noise = self.noise[rows[:, None], proposer[:, None], at]
        return expit(logit(true) + noise).astype(np.float32)

    def _chance(self, rows: Array, at: Array, shift: Array, proposer: Array | int) -> Array:
        odds = self.log_odds[self.task[rows], proposer] + shift
        chance: Array = expit(odds)
        cold = self._cold[self.task[rows]][:, None]
        return np.where(at < COLD_TOKENS, cold * chance, chance)

    def _grow(self, rows: int, length: int) -> None:
        """Make room for more rows or longer requests; what is there stays."""
        old = getattr(self, "shift", np.zeros((0, 0)))
        kept = (
            {n: getattr(self, n) for n in ("shift", "coin", "noise", "match", "task")}
            if old.size
            else {}
        )
        self.shift = np.zeros((rows, length))
        self.coin = np.ones((rows, PROPOSERS, length))
        self.noise = np.zeros((rows, PROPOSERS, length))
        self.match = np.zeros((rows, length), np.int32)
        self.task = np.zeros(rows, np.intp)
        for name, value in kept.items():
            getattr(self, name)[tuple(slice(n) for n in value.shape)] = value
        self._free += range(rows - 1, len(old) - 1, -1)


def place_log_odds(laws: Sequence[TaskLaw], depth: int) -> Array:
    """Return f64 [tasks, PROPOSERS, depth]: an average request by place; -inf none."""
    odds = np.full((len(laws), PROPOSERS, depth), -np.inf)
    for i, law in enumerate(laws):
        for proposer, chain in law.accept.items():
            places = [chain[min(j, len(chain) - 1)] for j in range(depth)]
            odds[i, proposer] = logit(np.clip(places, _TINY, 1.0 - _TINY))
    return odds


def match_length(log_odds: Array) -> Array:
    """Return match lengths i32 that tell as much of the n-gram's acceptance as a confidence does.

    log_odds: noisy log-odds that the first guess holds.
    """
    length = _MATCH_SCALE * np.exp(_MATCH_SLOPE * log_odds)
    return np.clip(np.rint(length), 1, _LONGEST_MATCH).astype(np.int32)


def match_log_odds(match_tokens: Array) -> Array:
    """Return the noisy log-odds that a match length stands for."""
    odds: Array = np.log(match_tokens / _MATCH_SCALE) / _MATCH_SLOPE
    return odds
