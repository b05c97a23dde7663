"""A planner that notes what steps were for besides tokens: prompts, tries, KV to catch up."""

from __future__ import annotations

import numpy as np

from parlay.engine.planner import Planner
from parlay.policies.cost import behind
from parlay.policies.types import (
    DRAFT_MODEL,
    Array,
    BatchView,
    Plan,
    PlanSource,
    Reason,
    StepOutcome,
)
from parlay.sim.backend import SimBackend
from parlay.sim.costs import CostModel, Work

_TO_LEARN = (int(Reason.EXPLORE), int(Reason.WARM_UP))


def prompts_ms(costs: CostModel, outcome: StepOutcome) -> float:
    """Return by how much the prompts in a step would have made it longer, had nobody drafted.

    So drafts pay for what they add to a step of prompts, where a token costs more.
    """
    if not outcome.prefill_tokens:
        return 0.0
    rows, kv = int((outcome.emitted > 0).sum()), outcome.kv_tokens
    fed = outcome.padded_tokens - int(outcome.verified_k.sum())
    alone = max(fed - outcome.prefill_tokens, 1)
    without = costs.time(Work(alone, rows, kv)).verify_ms
    return costs.time(Work(fed, rows, kv)).verify_ms - without


class NotedPlanner:
    """Passes everything on.

    Of the last step: tries, rows planned to learn something; prompts_s, the time of the prompts in
    it; and catch_up_s, of KV that the draft model had to catch up.
    """

    def __init__(self, inner: Planner, backend: SimBackend) -> None:
        self.inner, self.backend = inner, backend
        self.tries, self.prompts_s, self.catch_up_s = 0, 0.0, 0.0
        self._lag: Array = np.zeros(0, np.int64)

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Return the plan, noting what it is for."""
        plan, source = self.inner.plan(view)
        self.tries = 0 if plan is None else int(np.isin(plan.reason, _TO_LEARN).sum())
        self._lag = view.draft_kv_lag
        return plan, source

    def observe(self, outcome: StepOutcome) -> None:
        """Pass on what a step did, noting what had to be caught up in it."""
        self.inner.observe(outcome)
        self.prompts_s = 1e-3 * prompts_ms(self.backend.costs, outcome)
        self.catch_up_s = 0.0
        if not self.backend.catches_up:
            return
        drafts = (outcome.proposer == DRAFT_MODEL) & (outcome.requested_k > 0)
        owed = int(behind(self._lag[drafts]).sum())
        if owed:
            price, rows = self.backend.costs.time, (int(drafts.sum()),)
            late = price(Work(0, 0, 0, draft_rows=rows, catch_up_tokens=owed)).draft_ms.sum()
            on_time = price(Work(0, 0, 0, draft_rows=rows)).draft_ms.sum()
            self.catch_up_s = 1e-3 * max(float(late - on_time), 0.0)

    def close(self) -> None:
        """Let go of what is inside."""
        self.inner.close()
