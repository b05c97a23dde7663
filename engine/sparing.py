"""A policy in the engine's own thread that is asked as often as its time is worth.

Right after a forward pass a decision costs several times what it does in a loop of its own: what
it needs has left the processor's caches. Asked every other step, say, the policy hears of both
steps in one go, and `fit_plan` follows the texts' matches in between, as with a sidecar's plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from parlay.policies.cost import LEAST_MS, MOST_MS
from parlay.policies.policy import Policy
from parlay.policies.types import BatchView, Plan, PlanSource, Reason, StepOutcome

SHARE = 0.02
"""Most of an engine's time that a policy may take, as far as MOST_STEPS lets it be spared."""
MOST_STEPS = 4
_NEWS = 0.1
_FIRST_TRY = int(Reason.EXPLORE)


class SparingPlanner:
    """Runs a policy in every step, or in one of several where the steps are short.

    A plan serves again where it can be fitted to other matches, while nobody has come in and no
    prompts are read, and where it tries nothing out. share: most of the time that the policy may
    take; most_steps: that a plan serves for.
    """

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float] = time.perf_counter,
        share: float = SHARE,
        most_steps: int = MOST_STEPS,
    ) -> None:
        self.policy, self.clock, self.share, self.most_steps = policy, clock, share, most_steps
        self._plan: Plan | None = None
        self._untold: list[Callable[[], StepOutcome]] = []
        self._age, self._policy_ms, self._step_ms = 0, 0.0, 0.0

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Return the last plan where it serves once more, else a new one."""
        self._age += 1
        if self._plan is not None and self._age < self.every() and self._serves(self._plan, view):
            return self._plan, PlanSource.LOCAL
        start_s, self._plan = self.clock(), None
        self._tell()
        plan = self.policy.decide(view)
        self._policy_ms = _mean(self._policy_ms, 1e3 * (self.clock() - start_s))
        self._age = 0
        if math.isfinite(plan.token_value_ms) and not view.prefill_tokens.any():
            self._plan = None if (plan.reason >= _FIRST_TRY).any() else plan
        return plan, PlanSource.LOCAL

    def again(self) -> Plan | None:
        """Return the last plan where it is to serve in this step too, else None: show the batch.

        For a batch that reads no prompts; the plan has nothing of whoever has come in since.
        """
        if self._plan is None or self._age + 1 >= self.every():
            return None
        self._age += 1
        return self._plan

    def observe(self, outcome: StepOutcome) -> None:
        """Hear of a step; the policy is told before it decides again."""
        self.observe_later(lambda: outcome, outcome.step_ms, outcome.prefill_tokens)

    def observe_later(
        self, outcome: Callable[[], StepOutcome], step_ms: float, prefill_tokens: int
    ) -> None:
        """Hear of a step whose outcome is made when the policy is told: several in one go cost
        less. step_ms and prefill_tokens are the outcome's.
        """  # noqa: D205
        self._untold.append(outcome)
        if not prefill_tokens and LEAST_MS <= step_ms <= MOST_MS:
            self._step_ms = _mean(self._step_ms, step_ms)

    def close(self) -> None:
        """Nothing to let go of."""

    def every(self) -> int:
        """Return in how many steps the policy is asked once."""
        if self._step_ms <= 0.0:
            return 1
        return min(math.ceil(self._policy_ms / (self.share * self._step_ms)), self.most_steps)

    def _tell(self) -> None:
        """Tell the policy of every step since it was asked last, at once where it can hear so."""
        at_once = getattr(self.policy, "observe_all", None)
        if at_once is not None and len(self._untold) > 1:
            untold, self._untold = self._untold, []
            at_once([outcome() for outcome in untold])
        while self._untold:  # one at a time: where the policy raises, the others are told later
            self.policy.observe(self._untold.pop(0)())

    def _serves(self, plan: Plan, view: BatchView) -> bool:
        if view.prefill_tokens.any():
            return False
        planned, asked = plan.request_id, view.request_id
        # Some may have left; who is new is to be planned for.
        return planned is asked or set(asked.tolist()) <= set(planned.tolist())


def _mean(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _NEWS * (value - mean)
