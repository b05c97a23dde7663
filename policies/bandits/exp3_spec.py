"""Exponential weights over arms, for rewards that an adversary may choose.

Source: BanditSpec, EXP3Spec (Hou et al. 2025). The loss of the arm that was pulled is estimated as
(L + 1 - Y) / (L p), Y = accepted + 1, the mean over the batch's rows; weights are exp(-eta_t times
the sum of losses), eta_t = sqrt(log K / (t K)). The probability of the arm stands in the plan as
its propensity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import DEFAULT_ARMS, Pulls, check_seed, parse_arms, state_of
from parlay.policies.baselines.rows import batch_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import Array, BatchView, Plan, Reason, StepOutcome


@dataclass(slots=True, frozen=True)
class Exp3SpecSettings:
    """arms, each proposer:k; seed of the draws."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    seed: int = 0

    def __post_init__(self) -> None:
        parse_arms("exp3_spec", self.arms)
        check_seed("exp3_spec", self.seed)


@register("exp3_spec", Exp3SpecSettings)
class Exp3Spec(Stateless):
    """One arm for the whole batch in each step, drawn; draws depend on seed and count alone."""

    name = "exp3_spec"

    def __init__(self, settings: Exp3SpecSettings, limits: EngineLimits) -> None:
        del limits
        self.arms, self.seed = parse_arms("exp3_spec", settings.arms), settings.seed
        self.longest = max(k for _, k in self.arms)
        self.loss, self.steps, self.draws = np.zeros(len(self.arms)), 0, 0
        self.pending = Pulls()

    def decide(self, view: BatchView) -> Plan:
        """Draw an arm."""
        p = self.probabilities()
        arm = int(np.random.default_rng((self.seed, self.draws)).choice(len(p), p=p))
        self.draws += 1
        self.pending.add(view.step_id, arm, float(p[arm]))
        proposer, k = self.arms[arm]
        plan = batch_plan(view, proposer, k, Reason.EXPLORE)
        plan.propensity[:] = p[arm]
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Add a step's loss, as its arm's probability weighs it."""
        if (found := self.pending.reward(outcome)) is not None:
            arm, chance, reward = found
            self.steps += 1
            self.loss[arm] += max(self.longest + 1.0 - reward, 0.0) / (self.longest * chance)

    def probabilities(self) -> Array:
        """Return the chance f64 [arms] of each arm in the next step."""
        rate = np.sqrt(np.log(len(self.loss)) / (max(self.steps, 1) * len(self.loss)))
        weight = np.exp(-rate * (self.loss - self.loss.min()))
        found: Array = weight / weight.sum()
        return found

    def state(self) -> dict[str, Array]:
        """Return losses by arm, and counts of steps and draws."""
        return {
            "loss": self.loss.copy(),
            "steps": np.asarray(self.steps),
            "draws": np.asarray(self.draws),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        state_of("exp3_spec", len(self.arms), dict(state), self.state())
        self.loss = np.array(state["loss"])
        self.steps, self.draws = int(state["steps"]), int(state["draws"])
