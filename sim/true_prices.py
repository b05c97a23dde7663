"""What the next step's parts really cost: the simulator's own prices, in the solver's terms."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlay.policies.types import DRAFT_MODEL, MEDUSA, PROPOSERS, Array, BatchView, StepOutcome
from parlay.sim.backend import SimBackend
from parlay.sim.costs import Work

_OWED = 512
"""Tokens that the price of one caught up is taken over."""


class TruePrices:
    """Answers as `policies.cost.StepTime` does, with nothing left to learn.

    rows, kv_tokens: that decode in the next step, and what the target reads for it.
    """

    def __init__(self, backend: SimBackend) -> None:
        self.rows, self.kv_tokens = 1, 0
        self._price, self._catches_up = backend.costs.time, backend.catches_up

    def look(self, view: BatchView) -> None:
        """Take the batch that the next prices are for."""
        self.rows = int(np.count_nonzero(view.prefill_tokens == 0))
        self.kv_tokens = view.kv_tokens

    def verify_ms(self, tokens: Array, kv_tokens: float) -> Array:
        """Return the time of the target's pass over so many tokens, rising, with overhead."""
        # One price an edge: within a bucket nothing changes.
        unique, where = np.unique(tokens, return_inverse=True)
        took = [self._price(Work(int(n), self.rows, int(kv_tokens))) for n in unique]
        each = np.array([t.verify_ms + t.overhead_ms for t in took])
        return np.maximum.accumulate(each[where])

    def draft_ms(self) -> tuple[float, Array, float]:
        """Return the price of a pass of the draft model, of tokens, and of one caught up."""
        one, many = (
            self._drafts(draft_rows=(n,), draft_kv_tokens=self.kv_tokens)
            for n in (1, max(self.rows, 2))
        )
        token_ms = np.zeros(PROPOSERS)
        token_ms[DRAFT_MODEL] = max((many - one) / max(self.rows - 1, 1), 0.0)
        if not self._catches_up:
            return one, token_ms, 0.0
        late = self._drafts(draft_rows=(1,), catch_up_tokens=_OWED)
        return one, token_ms, max(late - one, 0.0) / _OWED

    def heads_ms(self) -> float:
        """Return the price of a pass of Medusa's heads."""
        return float(self._price(Work(0, 0, 0, medusa_rows=self.rows)).draft_ms[MEDUSA])

    def pad_ms(self) -> float:
        """Return nothing: no row is padded to another's length."""
        return 0.0

    def markup(self) -> float:
        """Return 1: nothing surprises who knows the prices."""
        return 1.0

    def observe(self, outcome: StepOutcome, catch_up_tokens: float) -> None:
        """Learn nothing."""

    def _drafts(self, **work: Any) -> float:
        return float(self._price(Work(0, 0, 0, **work)).draft_ms[DRAFT_MODEL])
