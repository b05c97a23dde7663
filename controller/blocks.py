"""Which policy decides for the whole batch now, and what a finished pair of blocks says.

The guard's switch-back (`policies.guard`), between two policies: a block of steps under either, in
random order, with a gap of random length after each pair. First steps of a block do not count.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from parlay.controller.candidate import Pair
from parlay.policies.guard_terms import TRANSITION_STEPS
from parlay.policies.switchback import (
    FIRST_GAP_STEPS,
    GAP,
    PREFILL_MOST,
    Ledger,
    Schedule,
    Step,
    log_gain,
    plan_of,
    step_of,
)
from parlay.policies.types import BatchView, StepOutcome

BLOCK_STEPS = 16
"""Steps measured in each half of a pair."""
GAP_STEPS = 8
"""Mean of the steps between pairs."""
_LONGEST = 4
"""A block ends after so many times its length in decisions, whatever could be measured."""
_PLANS = 64


class Blocks:
    """One engine's blocks; deterministic from its name, a seed and its history."""

    def __init__(self, engine_id: str, seed: int = 0) -> None:
        self._key = (zlib.crc32(engine_id.encode()), seed)
        self._at, self._ledger = Schedule(on=False), Ledger()
        self._at.this_gap = self._gap()
        self._blocks = np.full((_PLANS, 2), -1, np.int64)
        # Block of the pair, (without, with) prompts: steps, tokens, ms, log rows, prefill, 1.
        self._sums = np.zeros((2, 2, 6))
        self._pair: Pair | None = None

    def restart(self) -> None:
        """Give up the pair that is running: step ids start over."""
        at = self._at
        at.phase, at.decided, at.measured, at.block = GAP, 0, 0, at.block + 1
        self._ledger.last_step = -1
        self._blocks[:] = -1

    def next(self, view: BatchView) -> bool | None:
        """Say who decides for this step: True the candidate, False the incumbent, None no block."""
        at = self._at
        if len(view):
            if at.phase != GAP:
                if at.decided >= _LONGEST * (BLOCK_STEPS + TRANSITION_STEPS):
                    self._advance()
            elif at.decided >= at.this_gap:
                at.pair += 1
                at.treated_first = bool(self._draw(0) < 0.5)
                self._sums[:] = 0.0
                self._advance()
            at.decided += 1
        self._blocks[view.step_id % _PLANS] = (view.step_id, at.block)
        return None if at.phase == GAP else at.treated()

    def observe(self, outcome: StepOutcome) -> Pair | None:
        """Learn what a step took; return the pair that has ended since the last, if one has."""
        if 1e-4 <= outcome.step_ms <= 1e7:
            ms = self._ledger.tick(outcome.step_id, outcome.step_ms)
            step, plan = step_of(outcome, ms), plan_of(outcome)
            decided, block = self._blocks[plan % _PLANS].tolist() if plan >= 0 else (-1, -1)
            if step.rows and plan >= 0 and decided == plan:
                self._account(step, block)
        pair, self._pair = self._pair, None
        return pair

    def _account(self, step: Step, block: int) -> None:
        at = self._at
        if block < at.seen_block:
            return
        at.seen = at.seen + 1 if block == at.seen_block else 1
        at.seen_block = block
        if at.phase == GAP or block != at.block or at.seen <= TRANSITION_STEPS:
            return
        clean = step.prefill <= PREFILL_MOST
        # The last: a candidate that drafts nothing is no bypass here, it may well gain.
        what = (1.0, step.tokens, step.ms, math.log(step.rows), step.prefill, 1.0)
        self._sums[at.phase - 1, int(not clean) :] += what
        at.measured += clean
        if at.measured >= BLOCK_STEPS:
            self._advance()

    def _advance(self) -> None:
        at = self._at
        at.phase = (at.phase + 1) % 3
        at.block += 1
        at.decided = at.measured = 0
        if at.phase == GAP:
            self._close()
            at.this_gap = self._gap()

    def _close(self) -> None:
        ours, theirs = self._sums if self._at.treated_first else self._sums[::-1]
        found = log_gain(ours, theirs, BLOCK_STEPS)
        if found is not None:
            gain, ms, theirs_ms = found[0], float(ours[1, 2]), float(theirs[1, 2])
            lost_ms = -math.expm1(gain) * ms
            self._pair = Pair(gain, lost_ms, ms + theirs_ms, self._ledger.mean_ms)

    def _gap(self) -> int:
        return FIRST_GAP_STEPS + int(2 * (GAP_STEPS - FIRST_GAP_STEPS) * self._draw(1))

    def _draw(self, purpose: int) -> float:
        return float(np.random.default_rng((*self._key, self._at.pair, purpose)).random())
