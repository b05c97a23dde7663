"""An arm for each request, by an upper confidence bound that is linear in what is known of it.

Source: LinUCB (Li et al. 2010), disjoint arms: theta x + alpha sqrt(x' A^-1 x), reward tokens a
millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import DEFAULT_ARMS, parse_arms, state_of
from parlay.policies.bandits.contextual import LinearArms, Pull, allowed, features
from parlay.policies.baselines.rows import rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import Array, BatchView, Plan, Reason, StepOutcome


@dataclass(slots=True, frozen=True)
class LinUcbSettings:
    """arms, each proposer:k; alpha, how far above the estimate the bound lies."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    alpha: float = 0.5

    def __post_init__(self) -> None:
        parse_arms("linucb", self.arms)
        if not self.alpha >= 0.0:
            raise ValueError(f"linucb: alpha must be 0 or more, not {self.alpha}")


@register("linucb", LinUcbSettings)
class LinUcb(Stateless):
    """One ridge regression an arm."""

    name = "linucb"

    def __init__(self, settings: LinUcbSettings, limits: EngineLimits) -> None:
        del limits
        self.arms, self.alpha = parse_arms("linucb", settings.arms), settings.alpha
        self.model = LinearArms(len(self.arms))

    def decide(self, view: BatchView) -> Plan:
        """Return each row's arm with the largest bound among those it may pull."""
        x = features(view)
        theta, inverse = self.model.weights()
        width = np.sqrt(np.einsum("ri,aij,rj->ra", x, inverse, x))
        bound = np.where(allowed(view, self.arms), x @ theta.T + self.alpha * width, -np.inf)
        arm = bound.argmax(axis=1)
        self.model.pulled(view.step_id, Pull(view.request_id, arm, x))
        proposer, k = np.array(self.arms, np.int64).T
        return rows_plan(view, proposer[arm], k[arm], Reason.EXPLORE)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step."""
        self.model.learn(outcome)

    def state(self) -> dict[str, Array]:
        """Return the regressions."""
        return self.model.state()

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        state_of("linucb", len(self.arms), dict(state), self.state())
        self.model.load(state)
