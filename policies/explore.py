"""When to try a proposer that the plans leave alone, and what that may cost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parlay.policies.policy import EngineLimits
from parlay.policies.solver import Allocation, StepCosts, priced
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, NONE, PROPOSERS, Array, BatchView

_FIRST_INTERVAL = 40
_LAST_INTERVAL = 640
_BLOCK_STEPS = 3
_FEW_ROWS = 4
"""A larger batch shows enough at depth 1, where a second place would cost it dearly."""
_SHARE = 0.015
"""Most of the elapsed time that tries may cost, as estimated."""
_GOOD_ENOUGH = 0.6
"""A row whose first n-gram token holds this surely keeps it in a try of the draft model."""
_TRIED = (NGRAM, DRAFT_MODEL, MEDUSA)


class Explorer:
    """Counts the steps since each proposer was seen at work; runs one block of tries at a time."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.quiet_steps = np.zeros(PROPOSERS, np.int64)
        self.interval_steps = np.full(PROPOSERS, _FIRST_INTERVAL, np.int64)
        self.proposer = 0
        self.left = 0
        self.elapsed_ms = 0.0
        self.spent_ms = 0.0

    def observe(self, shown: Array, step_ms: float) -> None:
        """Hear whose drafts a step showed, bool [PROPOSERS], and how long it took."""
        self.quiet_steps = np.where(shown, 0, self.quiet_steps + 1)
        if np.isfinite(step_ms):
            self.elapsed_ms += max(step_ms, 0.0)

    def apply(
        self, view: BatchView, survival: Array, best: Allocation, costs: StepCosts
    ) -> tuple[Allocation, Array]:
        """Return the plan with a try in it where one is due, and bool [rows], which rows try."""
        used = np.unique(best.proposer)
        self.interval_steps[used] = _FIRST_INTERVAL
        if self.left == 0:
            self._begin(view, used)
        rows = self._rows(view, survival, best)
        if not rows.any():
            self.left = 0
            return best, rows
        self.left -= 1
        tried = self._with(view, survival, best, costs, rows)
        self.spent_ms += max(tried.step_ms - tried.emitted_tokens * best.ms_per_token, 0.0)
        if self.left == 0:
            longer = min(2 * int(self.interval_steps[self.proposer]), _LAST_INTERVAL)
            self.interval_steps[self.proposer] = longer
        return tried, rows

    def _begin(self, view: BatchView, used: Array) -> None:
        """Start a block for the first proposer that is due, if tries so far were cheap enough."""
        if self.spent_ms > _SHARE * self.elapsed_ms:
            return
        for proposer in _TRIED:
            due = self.quiet_steps[proposer] >= self.interval_steps[proposer]
            if due and proposer not in used and self.limits.has(proposer):
                self.proposer, self.left = int(proposer), _BLOCK_STEPS
                return

    def _rows(self, view: BatchView, survival: Array, best: Allocation) -> Array:
        """Return bool [rows]: who takes part in the block that is running."""
        if self.left == 0:
            return np.zeros(len(view), bool)
        sure = (best.k > 0) & (survival[:, NGRAM, 0] >= _GOOD_ENOUGH)
        rows: Array = survival[:, self.proposer, 0] > 0.0
        return rows & ~sure

    def _with(
        self, view: BatchView, survival: Array, best: Allocation, costs: StepCosts, rows: Array
    ) -> Allocation:
        depth = min(2 if rows.sum() <= _FEW_ROWS else 1, survival.shape[2])
        room = len(costs.verify_ms) - 1 - int(best.k[~rows].sum())
        depth = min(depth, max(room, 0) // int(rows.sum()))
        k = np.where(rows, np.minimum(depth, view.max_k), best.k).astype(np.int32)
        proposer = np.where(rows, self.proposer, best.proposer).astype(np.uint8)
        proposer[k == 0] = NONE
        return priced(survival, costs, float(len(view)), proposer, k, best.price_ms)

    def state(self) -> dict[str, Array]:
        """Return everything that later tries depend on."""
        return {
            "quiet_steps": self.quiet_steps.copy(),
            "interval_steps": self.interval_steps.copy(),
            "block": np.array([self.proposer, self.left]),
            "time_ms": np.array([self.elapsed_ms, self.spent_ms]),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if not set(self.state()) <= set(state) or np.shape(state["quiet_steps"]) != (PROPOSERS,):
            raise ValueError("the explorer's state is incomplete or of another version")
        self.quiet_steps = np.array(state["quiet_steps"])
        self.interval_steps = np.array(state["interval_steps"])
        self.proposer, self.left = (int(v) for v in state["block"])
        self.elapsed_ms, self.spent_ms = (float(v) for v in state["time_ms"])
