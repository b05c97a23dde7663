"""An arm for each request, as good as a draw from what its reward may be.

Source: linear Thompson sampling (Agrawal and Goyal 2013): theta drawn from N(estimate, scale^2
A^-1) for each arm, anew for each request; reward tokens a millisecond. Propensities are counted
over 64 more draws for each request, with one added to each arm it may pull.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import DEFAULT_ARMS, check_seed, parse_arms, state_of
from parlay.policies.bandits.contextual import LinearArms, Pull, allowed, features
from parlay.policies.baselines.rows import rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import Array, BatchView, Plan, Reason, StepOutcome

_DRAWS = 64


@dataclass(slots=True, frozen=True)
class ThompsonSettings:
    """arms, each proposer:k; scale of the draws' spread; seed of the draws."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    scale: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        parse_arms("thompson", self.arms)
        if not self.scale > 0.0:
            raise ValueError(f"thompson: scale must be above 0, not {self.scale}")
        check_seed("thompson", self.seed)


@register("thompson", ThompsonSettings)
class Thompson(Stateless):
    """One ridge regression an arm; draws depend on seed and count alone."""

    name = "thompson"

    def __init__(self, settings: ThompsonSettings, limits: EngineLimits) -> None:
        del limits
        self.arms = parse_arms("thompson", settings.arms)
        self.scale, self.seed, self.draws = settings.scale, settings.seed, 0
        self.model = LinearArms(len(self.arms))

    def decide(self, view: BatchView) -> Plan:
        """Draw each row's arm."""
        x, may = features(view), allowed(view, self.arms)
        theta, inverse = self.model.weights()
        mean = x @ theta.T
        spread = self.scale * np.sqrt(np.einsum("ri,aij,rj->ra", x, inverse, x))
        rng = np.random.default_rng((self.seed, self.draws))
        self.draws += 1
        # A row's reward under a drawn theta is itself normal: no theta need be drawn.
        drawn = mean + spread * rng.standard_normal((1 + _DRAWS, *mean.shape))
        best = np.where(may, drawn, -np.inf).argmax(axis=2)
        arm = best[0]
        times = (best[1:] == arm).sum(axis=0)
        self.model.pulled(view.step_id, Pull(view.request_id, arm, x))
        proposer, k = np.array(self.arms, np.int64).T
        plan = rows_plan(view, proposer[arm], k[arm], Reason.EXPLORE)
        plan.propensity[:] = (times + 1.0) / (_DRAWS + may.sum(axis=1))
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step."""
        self.model.learn(outcome)

    def state(self) -> dict[str, Array]:
        """Return the regressions and the count of draws."""
        return {**self.model.state(), "draws": np.asarray(self.draws)}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        state_of("thompson", len(self.arms), dict(state), self.state())
        self.model.load(state)
        self.draws = int(state["draws"])
