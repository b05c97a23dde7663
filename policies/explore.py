"""When to try a proposer that the plans leave alone, and what that may cost.

A try is worth its time only where it can change a decision: where the proposer would be planned if
it were as good as what is known of it still allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from parlay.policies.policy import EngineLimits
from parlay.policies.solver import DWELL_STEPS, Allocation, StepCosts, best_plan, priced
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, NONE, PROPOSERS, Array, BatchView

_FIRST_INTERVAL = 40
_LAST_INTERVAL = 640
_BLOCK_STEPS = 4
_LOOK_STEPS = 4
"""Whether a try could change the plan is looked at every so many steps: it costs another plan."""
_MOST_ROWS = 4
_DEPTH = 2
"""The second place shows whether a proposer that holds its first token goes on to hold more."""
_SHARE = 0.015
"""Most of the elapsed time that tries may cost, as estimated."""
_GOOD_ENOUGH = 0.6
"""A row whose first n-gram token holds this surely keeps it in a try of the draft model."""
_TRIED = (NGRAM, DRAFT_MODEL, MEDUSA)

Hopes = Callable[[int, int], Array]
"""(proposer, steps it was not seen) -> survival f64 [rows, PROPOSERS, K], that proposer's as high
as what is known of it allows."""


class Explorer:
    """Counts the steps since each proposer was seen at work; runs one block of tries at a time."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.quiet_steps = np.zeros(PROPOSERS, np.int64)
        self.interval_steps = np.full(PROPOSERS, _FIRST_INTERVAL, np.int64)
        self.proposer = 0
        self.left = 0
        self.rest_steps = 0
        self.elapsed_ms = 0.0
        self.spent_ms = 0.0

    def observe(self, shown: Array, step_ms: float, steps: int) -> None:
        """Hear whose drafts a step showed, bool [PROPOSERS], and how long it took.

        steps: how many there were since the last one heard of, this one counted.
        """
        self.quiet_steps = np.where(shown, 0, self.quiet_steps + steps)
        if math.isfinite(step_ms):
            self.elapsed_ms += max(step_ms, 0.0) * steps

    def look_soon(self) -> None:
        """Begin anew with the shortest interval between tries: what text is like has changed."""
        self.interval_steps[:] = _FIRST_INTERVAL

    def apply(
        self, view: BatchView, survival: Array, hopes: Hopes, best: Allocation, costs: StepCosts
    ) -> tuple[Allocation, Array]:
        """Return the plan with a try in it where one is due, and bool [rows], which rows try."""
        used = np.bincount(best.proposer, minlength=PROPOSERS) > 0
        self.interval_steps[used] = _FIRST_INTERVAL
        if self.left == 0:
            self._begin(used, hopes, best, costs)
        rows = self._rows(view, survival, best, costs)
        if not rows.any():
            self.left = 0
            return best, rows
        tried = self._with(view, survival, best, costs, rows)
        cost_ms = tried.step_ms - tried.emitted_tokens * best.ms_per_token
        if self.left == _BLOCK_STEPS and self.proposer == DRAFT_MODEL:
            cost_ms += (DWELL_STEPS - 1) * float(costs.switch_ms[rows].sum())
        self.spent_ms += max(cost_ms, 0.0)
        self.left -= 1
        return tried, rows

    def _begin(self, used: Array, hopes: Hopes, best: Allocation, costs: StepCosts) -> None:
        """Start a block for the first proposer that is due and might be worth planning."""
        self.rest_steps -= 1
        if self.rest_steps > 0 or self.spent_ms > _SHARE * self.elapsed_ms:
            return
        self.rest_steps = _LOOK_STEPS
        for proposer in _TRIED:
            quiet, interval = self.quiet_steps[proposer], self.interval_steps[proposer]
            if quiet < interval or used[proposer] or not self.limits.has(proposer):
                continue
            hoped = hopes(proposer, int(quiet))
            emits = float((hoped > 0.0).any(axis=(1, 2)).sum())
            plan = best_plan(hoped, costs, max(emits, 1.0), best.ms_per_token)
            if (plan.proposer == proposer).any():
                self.proposer, self.left = proposer, _BLOCK_STEPS
                self.interval_steps[proposer] = min(2 * int(interval), _LAST_INTERVAL)
                return

    def _rows(self, view: BatchView, survival: Array, best: Allocation, costs: StepCosts) -> Array:
        """Return bool [rows]: who takes part in the block that is running, the cheapest first."""
        rows = np.zeros(len(view), bool)
        if self.left > 0:
            sure = (best.k > 0) & (survival[:, NGRAM, 0] >= _GOOD_ENOUGH)
            can = np.flatnonzero((survival[:, self.proposer, 0] > 0.0) & ~sure)
            cheap = costs.switch_ms[can] if self.proposer == DRAFT_MODEL else np.zeros(len(can))
            rows[can[np.argsort(cheap, kind="stable")[:_MOST_ROWS]]] = True
        return rows

    def _with(
        self, view: BatchView, survival: Array, best: Allocation, costs: StepCosts, rows: Array
    ) -> Allocation:
        depth = min(_DEPTH, survival.shape[2])
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
            "block": np.array([self.proposer, self.left, self.rest_steps]),
            "time_ms": np.array([self.elapsed_ms, self.spent_ms]),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if not set(self.state()) <= set(state) or np.shape(state["quiet_steps"]) != (PROPOSERS,):
            raise ValueError("the explorer's state is incomplete or of another version")
        self.quiet_steps = np.array(state["quiet_steps"])
        self.interval_steps = np.array(state["interval_steps"])
        self.proposer, self.left, self.rest_steps = (int(v) for v in state["block"])
        self.elapsed_ms, self.spent_ms = (float(v) for v in state["time_ms"])
