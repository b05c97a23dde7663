"""A short ladder of token counts for an engine that starts: what verifying more tokens would take.

A plan made before anything was measured sees the steps that it asks for, and those only: where its
prior says that tokens are dear it stays below a knee it has never met. So where a deeper plan would
win if the curve went on half as steeply as it is thought to, the next step verifies up to twice the
tokens of any before it; and where a plan gains so little that a cheaper plain step could overturn
it, one step drafts nothing. A rung is taken twice at most. All of them may cost a few steps, and
a small share of the time where batches grow later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from parlay.policies.cost import padded
from parlay.policies.solver import Allocation, StepCosts, best_plan, no_speculation, priced
from parlay.policies.types import Array, BatchView, StepOutcome

_RUNG = 2.0
_HOPE = 0.5
"""Of the slope so far: the curve is at most so flat beyond what was seen."""
_NEAR = 1.25
"""Token counts nearer than this teach the same."""
_SMALL_GAIN = 1.25
_TRIES = 2
_GRANT_STEPS, _SHARE = 3.0, 0.001
"""What rungs may cost, as estimated: so many steps, and of the time elapsed."""
_FIRST_REST, _LAST_REST = 1, 64
_SLOTS = 24
"""Rungs are counted by the half powers of two."""


class Staircase:
    """Says which rung is due, if any; rests for longer each time that none is."""

    def __init__(self) -> None:
        self.tries = np.zeros(_SLOTS, np.int64)
        self.rest_steps, self.left = _FIRST_REST, 0
        self.elapsed_ms = self.spent_ms = self.mean_ms = 0.0

    def due(self) -> bool:
        """Count a step; return whether it is one in which to look."""
        self.left -= 1
        return self.left < 0

    def observe(self, outcome: StepOutcome) -> None:
        """Hear what a step took."""
        step_ms = outcome.step_ms
        if math.isfinite(step_ms) and step_ms > 0.0:
            self.elapsed_ms += step_ms
            self.mean_ms += (step_ms - self.mean_ms) / 8.0 if self.mean_ms else step_ms

    def rung(
        self, view: BatchView, worth: Array, costs: StepCosts, emits: float, best: Allocation,
        taught: Array,
    ) -> Allocation | None:  # fmt: skip
        """Return the step that teaches most, None where it could change no decision.

        worth f64 [rows, PROPOSERS, K], costs and emits: as `best` was chosen by. taught: token
        counts of steps so far.
        """
        allowed_ms = _GRANT_STEPS * self.mean_ms + _SHARE * self.elapsed_ms
        fed = np.arange(len(view), len(view) + len(costs.verify_ms))
        tokens = padded(fed, view.bucket_edges)
        known = taught[(taught >= tokens[0] / _NEAR) & (taught <= tokens[-1] * _NEAR)]
        if len(known) and self.spent_ms < allowed_ms:
            for found in (
                self._down(len(view), tokens, costs, emits, best, known),
                self._up(tokens, worth, costs, emits, best, known),
            ):
                if found is not None and self._take(tokens, found, best, allowed_ms):
                    return found
        self.left, self.rest_steps = self.rest_steps, min(2 * self.rest_steps, _LAST_REST)
        return None

    def _down(
        self, rows: int, tokens: Array, costs: StepCosts, emits: float, best: Allocation,
        known: Array,
    ) -> Allocation | None:  # fmt: skip
        """Return a plain step where none was seen and a gain is small."""
        none = no_speculation(rows, emits, costs)
        small = none.ms_per_token < _SMALL_GAIN * best.ms_per_token
        return none if small and best.k.any() and known[0] > _NEAR * tokens[0] else None

    def _up(
        self, tokens: Array, worth: Array, costs: StepCosts, emits: float, best: Allocation,
        known: Array,
    ) -> Allocation | None:  # fmt: skip
        """Return the best step below the next rung if tokens beyond those seen were cheap."""
        top = min(int(np.searchsorted(tokens, known[-1], side="right")), len(tokens) - 1)
        reach = min(int(np.searchsorted(tokens, _RUNG * known[-1])), len(tokens) - 1)
        if tokens[reach] <= _NEAR * known[-1]:
            return None
        low = top // 2
        slope = float(costs.verify_ms[max(top, 1)] - costs.verify_ms[low]) / max(top - low, 1)
        hoped = costs.verify_ms.copy()
        beyond = np.arange(len(hoped) - top)
        hoped[top:] = np.minimum(hoped[top:], hoped[top] + _HOPE * slope * beyond)
        plan = best_plan(worth, replace(costs, verify_ms=hoped[: reach + 1]), emits)
        if tokens[int(plan.k.sum())] <= _NEAR * known[-1]:
            return None
        return priced(worth, costs, emits, plan.proposer, plan.k, best.price_ms)

    def _take(self, tokens: Array, found: Allocation, best: Allocation, allowed_ms: float) -> bool:
        """Book a rung that may be tried again and whose estimated cost is allowed."""
        cost_ms = max(found.step_ms - found.emitted_tokens * best.ms_per_token, 0.0)
        slot = min(round(2.0 * math.log2(tokens[int(found.k.sum())])), _SLOTS - 1)
        if self.tries[slot] >= _TRIES or self.spent_ms + cost_ms > allowed_ms:
            return False
        self.tries[slot] += 1
        self.spent_ms += cost_ms
        self.rest_steps = _FIRST_REST
        return True

    def state(self) -> dict[str, Array]:
        """Return everything that later rungs depend on."""
        times = np.array([self.elapsed_ms, self.spent_ms, self.mean_ms])
        rest = np.array([self.rest_steps, self.left])
        return {"tries": self.tries.copy(), "time_ms": times, "rest": rest}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if set(state) != set(self.state()) or np.shape(state["tries"]) != (_SLOTS,):
            raise ValueError("the staircase's state is incomplete or of another version")
        self.tries = np.array(state["tries"], np.int64)
        self.elapsed_ms, self.spent_ms, self.mean_ms = (float(v) for v in state["time_ms"])
        self.rest_steps, self.left = (int(v) for v in state["rest"])
