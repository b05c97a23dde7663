"""Which reports to the sidecar may stay unsent: off is a bypass, also of the wire.

While plans draft nothing and the batch stays as it is, the next plan will be the same one. A report
and its plan cost the engine about .7 ms of a core, half of it with the interpreter's lock held.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from parlay.policies.types import Array, BatchView, Plan, ShadowRows, StepOutcome

QUIET_STEPS = 4
"""One report in so many steps tells a policy that it may speculate again."""


class Quiet:
    """Holds back reports that say nothing new; what the n-gram would have drafted is kept."""

    def __init__(self) -> None:
        self._reported: int | None = None
        self._ids: Array = np.zeros(0, np.uint64)
        self._shadows: list[ShadowRows] = []

    def holds(self, outcome: StepOutcome | None, view: BatchView, plan: Plan | None) -> bool:
        """Say whether the report of `outcome` and `view` may be left out; keep its shadows if so.

        plan: the newest one.
        """
        if (
            outcome is None
            or plan is None
            or self._reported is None
            or view.step_id - self._reported >= QUIET_STEPS
            or plan.k.any()
            or outcome.drafted_k.any()
            or outcome.draft_depth
            or outcome.prefill_tokens
            or view.prefill_tokens.any()
            or not np.array_equal(view.request_id, self._ids)
        ):
            return False
        if len(outcome.shadow):
            self._shadows.append(outcome.shadow)
        return True

    def sent(self, outcome: StepOutcome | None, view: BatchView) -> StepOutcome | None:
        """Note a report that is sent after all; return its outcome with the shadows held back."""
        self._reported, self._ids = view.step_id, view.request_id
        if outcome is None or not self._shadows:
            return outcome
        every = [*self._shadows, outcome.shadow]
        self._shadows = []
        return dataclasses.replace(outcome, shadow=_joined(every))


def _joined(parts: list[ShadowRows]) -> ShadowRows:
    names = [f.name for f in dataclasses.fields(ShadowRows)]
    return ShadowRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
