"""Where plans come from: a policy in this process. `remote.py` has the one that asks a sidecar."""

from __future__ import annotations

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
