"""Optimism over arms: the largest upper confidence bound on tokens a step.

Source: BanditSpec, UCBSpec (Hou et al. 2025). Reward Y = accepted + 1 in [1, L + 1], the mean over
the batch's rows; an arm pulled n times in t steps has the radius
(L / 2) sqrt((1 + n) / n^2 (1 + 2 log(K t^2 (1 + n)^.5 / delta))). What a step costs is not looked
at: that is the source's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import DEFAULT_ARMS, Pulls, parse_arms, state_of
from parlay.policies.baselines.rows import batch_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import Array, BatchView, Plan, Reason, StepOutcome


@dataclass(slots=True, frozen=True)
class UcbSpecSettings:
    """arms, each proposer:k; delta, how likely the bounds may fail."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    delta: float = 0.05

    def __post_init__(self) -> None:
        parse_arms("ucb_spec", self.arms)
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"ucb_spec: delta must be between 0 and 1, not {self.delta}")


def radius(pulls: Array, step: int, longest: int, delta: float) -> Array:
    """Return the half-width f64 [arms] of each arm's bound; pulls above 0."""
    n, t = pulls.astype(float), max(step, 1)
    inside = 1.0 + 2.0 * np.log(len(n) * t**2 * np.sqrt(1.0 + n) / delta)
    found: Array = longest / 2.0 * np.sqrt((1.0 + n) / n**2 * inside)
    return found


@register("ucb_spec", UcbSpecSettings)
class UcbSpec(Stateless):
    """One arm for the whole batch in each step."""

    name = "ucb_spec"

    def __init__(self, settings: UcbSpecSettings, limits: EngineLimits) -> None:
        del limits
        self.arms = parse_arms("ucb_spec", settings.arms)
        self.failure, self.longest = settings.delta, max(k for _, k in self.arms)
        self.pulls, self.total = np.zeros(len(self.arms), np.int64), np.zeros(len(self.arms))
        self.pending = Pulls()

    def decide(self, view: BatchView) -> Plan:
        """Return the arm with the largest bound, each one once before that."""
        arm = self._choose()
        self.pending.add(view.step_id, arm)
        proposer, k = self.arms[arm]
        return batch_plan(view, proposer, k, Reason.EXPLORE)

    def observe(self, outcome: StepOutcome) -> None:
        """Add a step's reward to its arm."""
        if (found := self.pending.reward(outcome)) is not None:
            arm, _, reward = found
            self.pulls[arm] += 1
            self.total[arm] += reward

    def _choose(self) -> int:
        if not self.pulls.all():
            return int(self.pulls.argmin())
        bound = self.total / self.pulls
        bound += radius(self.pulls, int(self.pulls.sum()), self.longest, self.failure)
        return int(bound.argmax())

    def state(self) -> dict[str, Array]:
        """Return pulls and rewards by arm."""
        return {"pulls": self.pulls.copy(), "total": self.total.copy()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        state_of("ucb_spec", len(self.arms), dict(state), self.state())
        self.pulls, self.total = np.array(state["pulls"]), np.array(state["total"])
