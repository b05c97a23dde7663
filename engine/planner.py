"""Where plans come from: a policy in this process. `remote.py` has the one that asks a sidecar."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from parlay.policies.policy import Policy
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome


class Planner(Protocol):
    """Gives the step loop its plans and hears what came of them; never blocks it."""

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Return the newest plan for the batch and where it came from; None: do not speculate."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Hear what a step did."""
        ...

    def close(self) -> None:
        """Let go of threads and sockets."""
        ...


class LocalPlanner:
    """Runs a policy in the engine's own thread: the plan is of this very step."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Decide now."""
        return self.policy.decide(view), PlanSource.LOCAL

    def observe(self, outcome: StepOutcome) -> None:
        """Learn now."""
        self.policy.observe(outcome)

    def close(self) -> None:
        """Nothing to let go of."""


class OverlappedPlanner:
    """Runs a policy beside the models: it learns from a step while they run the next one.

    Each plan is of this very step and knows all steps but the last, whichever thread is faster. An
    error in learning is raised where the next plan is asked for.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._learner = ThreadPoolExecutor(1, "policy")
        self._learning: Future[None] | None = None
        self._last: StepOutcome | None = None

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Decide now; what the last step showed is learned from here on, beside the caller."""
        self._settle()
        plan = self.policy.decide(view)
        if self._last is not None:
            self._learning = self._learner.submit(self.policy.observe, self._last)
            self._last = None
        return plan, PlanSource.LOCAL

    def observe(self, outcome: StepOutcome) -> None:
        """Keep an outcome until the next plan is made."""
        if self._last is not None:
            self._settle()
            self.policy.observe(self._last)
        self._last = outcome

    def close(self) -> None:
        """Learn from what is left and end the thread."""
        try:
            self._settle()
            if self._last is not None:
                self.policy.observe(self._last)
        finally:
            self._last = None
            self._learner.shutdown()

    def _settle(self) -> None:
        if self._learning is not None:
            learning, self._learning = self._learning, None
            learning.result()
