"""Five ways in which drafts hold, to learn them from: rows of requests, each followed by another.

Chances are log-odds of a place, shifted by the request and, where it has phases, by its phase. Two
drafters: the n-gram at a match length of 5, and the draft model, which holds a little less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    NONE,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    StepOutcome,
    no_shadows,
)

K = 6
PROPOSER_SHIFT = {NGRAM: 0.4, DRAFT_MODEL: 0.0}
MATCH_RATE = 0.5


@dataclass(frozen=True)
class Kind:
    """P(place holds | reached), the last repeating; the requests' spread and its degrees of freedom
    (0: normal); the phases' shift and mean length in tokens; all in log-odds.
    """

    accept: tuple[float, ...]
    spread: float = 0.0
    freedom: int = 0
    phase_shift: float = 0.0
    phase_tokens: float = 60.0


KINDS = {
    "iid": Kind((0.7,)),
    "decaying": Kind((0.9, 0.8, 0.73, 0.52, 0.5), spread=0.4),
    "rising": Kind((0.57, 0.63, 0.70, 0.75, 0.80, 0.83), spread=0.4),
    "phase-switching": Kind((0.7, 0.65, 0.6), spread=0.3, phase_shift=0.8),
    "heavy-tailed": Kind((0.7, 0.7, 0.65), spread=0.8, freedom=3),
}


class Process:
    """`rows` requests that run side by side; `shift` is added to all log-odds, and may change."""

    def __init__(self, kind: Kind, rows: int, seed: int, tasks: int = 1) -> None:
        self.kind, self.rows, self.tasks = kind, rows, tasks
        self.rng = np.random.default_rng(seed)
        odds = np.array([kind.accept[min(j, len(kind.accept) - 1)] for j in range(K)])
        self.odds = np.log(odds / (1.0 - odds))
        self.shift = 0.0
        self.step_id = 0
        self.ids = np.arange(1, rows + 1).astype(np.uint64)
        self.task = np.arange(rows) % tasks + 1
        self.output, self.length = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.own, self.phase = np.zeros(rows), np.zeros(rows)
        self._renew(np.ones(rows, bool))
        self.output[:] = self.rng.integers(0, self.length)
        self.match = self._matches()

    def _renew(self, which: Array) -> None:
        many, kind = int(which.sum()), self.kind
        draw = self.rng.standard_t(kind.freedom, many) if kind.freedom else None
        own = self.rng.normal(size=many) if draw is None else np.clip(draw, -4.0, 4.0)
        self.own[which] = kind.spread * own
        self.phase[which] = self.rng.choice([-1.0, 1.0], many)
        self.length[which] = self.rng.integers(60, 180, many)
        self.output[which] = 2

    def _matches(self) -> Array:
        return np.where(self.rng.random(self.rows) < MATCH_RATE, 5, 0).astype(np.int32)

    def view(self) -> BatchView:
        """Return the batch as an engine would show it."""
        rows, none = self.rows, np.zeros(self.rows, np.int32)
        context = (100 + self.output).astype(np.int32)
        return BatchView(
            request_id=self.ids.copy(),
            task=self.task.astype(np.uint32),
            context_tokens=context,
            output_tokens=self.output.astype(np.int32),
            prefill_tokens=none,
            temperature=np.zeros(rows, np.float32),
            max_k=np.full(rows, K, np.int32),
            proposer_mask=np.full(rows, 0b0111, np.uint8),
            tpot_target_ms=np.full(rows, np.nan, np.float32),
            recent_accept=np.ones(rows, np.float32),
            match_tokens=self.match,
            draft_kv_lag=none,
            seeded=np.zeros(rows, bool),
            step_id=self.step_id,
            running=rows,
            kv_tokens=int(context.sum()),
        )

    def chance(self, proposer: Array) -> Array:
        """Return P(place holds | reached) f64 [rows, K] of the rows' proposers now."""
        by_proposer = np.zeros(PROPOSERS)
        for one, more in PROPOSER_SHIFT.items():
            by_proposer[one] = more
        odds = self.own + self.phase * self.kind.phase_shift + by_proposer[proposer] + self.shift
        return 1.0 / (1.0 + np.exp(-(self.odds + odds[:, None])))

    def step(self, proposer: Array, k: Array, plan: Plan | None = None) -> StepOutcome:
        """Draft and verify k tokens a row; a step takes 10 ms, .15 a token and .4 a pass."""
        rows = self.rows
        flips = self.rng.random((rows, K)) < self.chance(proposer)
        accepted = np.minimum(np.cumprod(flips, axis=1).sum(axis=1), k)
        depth = int(k[proposer == DRAFT_MODEL].max(initial=0))
        draft_ms = np.zeros(PROPOSERS)
        draft_ms[DRAFT_MODEL] = 0.4 * depth
        tokens = rows + int(k.sum())
        verify_ms = 10.0 + 0.15 * tokens
        outcome = StepOutcome(
            request_id=self.ids.copy(),
            task=self.task.astype(np.uint32),
            proposer=np.where(k > 0, proposer, NONE).astype(np.uint8),
            requested_k=k.astype(np.int16),
            drafted_k=k.astype(np.int16),
            verified_k=k.astype(np.int16),
            accepted=accepted.astype(np.int16),
            emitted=(accepted + 1).astype(np.int16),
            match_tokens=self.match,
            truncated_by=np.zeros(rows, np.uint8),
            plan_source=np.ones(rows, np.uint8),
            plan_step_id=np.full(rows, plan.step_id if plan else self.step_id, np.uint64),
            confidences=np.full((rows, K), np.nan, np.float32),
            shadow=no_shadows(),
            step_id=self.step_id,
            padded_tokens=tokens,
            kv_tokens=int((100 + self.output).sum()),
            draft_ms=draft_ms,
            draft_depth=depth,
            verify_ms=verify_ms,
            step_ms=verify_ms + float(draft_ms.sum()) + 0.2,
        )
        self._advance(accepted + 1)
        return outcome

    def _advance(self, emitted: Array) -> None:
        self.output += emitted
        turns = self.rng.random(self.rows) < 1.0 - np.exp(-emitted / self.kind.phase_tokens)
        self.phase = np.where(turns, -self.phase, self.phase)
        over = self.output >= self.length
        if over.any():
            self.ids[over] += np.uint64(self.rows)
            self._renew(over)
        self.match = self._matches()
        self.step_id += 1


class Bins:
    """Foretold chances against what held, in ten bins: expected calibration error (Naeini 2015)."""

    def __init__(self) -> None:
        self.sums = np.zeros((3, 10))

    def add(self, chance: Array, held: Array) -> None:
        """Add places: foretold chance f64 [n], held bool [n]."""
        cell = np.minimum((10.0 * chance).astype(int), 9)
        for row, weight in enumerate((chance, held.astype(float), np.ones(len(cell)))):
            self.sums[row] += np.bincount(cell, weight, minlength=10)

    @property
    def error(self) -> float:
        """Mean over places of |foretold - held| by bin."""
        foretold, held, places = self.sums
        return float(np.abs(foretold - held).sum() / places.sum())


def reached(survival: Array, accepted: Array, verified: Array) -> tuple[Array, Array]:
    """Return each reached place's chance, as survival [rows, K] has it, and whether it held."""
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    place = np.arange(survival.shape[1])
    seen = place < np.minimum(accepted + 1, verified)[:, None]
    chance = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0.0)
    return chance[seen], (place < accepted[:, None])[seen]
