"""The best draft shape of each group of batch sizes, by tokens a second, with a little chance.

Source: FastRL's bandit (Hu et al. 2025): epsilon-greedy, epsilon .1, within groups of batch sizes
split at 1, 2, 5 and 21; an arm's reward in a step is median(accepted) times the batch over the
step's time, its value the mean of its last 300. Accepted counts the bonus token here, so that not
drafting is an arm like others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import DEFAULT_ARMS, Pulls, check_seed, parse_arms, state_of
from parlay.policies.baselines.rows import batch_plan, slot_of
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import Array, BatchView, Plan, Reason, StepOutcome

_SPLITS = np.array([1, 2, 5, 21])
_WINDOW = 300


@dataclass(slots=True, frozen=True)
class BegMabSettings:
    """arms, each proposer:k; epsilon, the share of random pulls; seed of the draws."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    epsilon: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        parse_arms("beg_mab", self.arms)
        if not 0.0 < self.epsilon < 1.0:
            raise ValueError(f"beg_mab: epsilon must be between 0 and 1, not {self.epsilon}")
        check_seed("beg_mab", self.seed)


@register("beg_mab", BegMabSettings)
class BegMab(Stateless):
    """Keeps the newest rewards f64 [groups, arms, 300] and how many there were."""

    name = "beg_mab"

    def __init__(self, settings: BegMabSettings, limits: EngineLimits) -> None:
        del limits
        self.arms = parse_arms("beg_mab", settings.arms)
        self.epsilon, self.seed, self.draws = settings.epsilon, settings.seed, 0
        self.reward = np.full((len(_SPLITS), len(self.arms), _WINDOW), np.nan)
        self.seen = np.zeros((len(_SPLITS), len(self.arms)), np.int64)
        self.pending = Pulls()

    def decide(self, view: BatchView) -> Plan:
        """Return the best arm of this batch size, or any at random; each one once before that."""
        group = slot_of(_SPLITS, len(view))
        rng = np.random.default_rng((self.seed, self.draws))
        self.draws += 1
        fresh = np.flatnonzero(self.seen[group] == 0)
        if len(fresh):
            arm, chance = int(fresh[0]), 1.0
        else:
            best = int(np.nanmean(self.reward[group], axis=1).argmax())
            arm = int(rng.integers(len(self.arms))) if rng.random() < self.epsilon else best
            chance = self.epsilon / len(self.arms) + (1.0 - self.epsilon) * (arm == best)
        self.pending.add(view.step_id, arm)
        proposer, k = self.arms[arm]
        plan = batch_plan(view, proposer, k, Reason.EXPLORE)
        plan.propensity[:] = chance
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Add a step's reward to its arm, in its group."""
        found = self.pending.reward(outcome)
        emits = outcome.emitted > 0
        if found is None or not 0.0 < outcome.step_ms < np.inf:
            return
        place = slot_of(_SPLITS, len(outcome)), found[0]
        tokens = float(np.median(outcome.accepted[emits])) + 1.0
        at = self.seen[place] % _WINDOW
        self.reward[(*place, at)] = tokens * len(outcome) / outcome.step_ms
        self.seen[place] += 1

    def state(self) -> dict[str, Array]:
        """Return rewards, their counts and the count of draws."""
        return {
            "reward": self.reward.copy(),
            "seen": self.seen.copy(),
            "draws": np.asarray(self.draws),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        state_of("beg_mab", len(self.arms), dict(state), self.state())
        self.reward, self.seen = np.array(state["reward"]), np.array(state["seen"])
        self.draws = int(state["draws"])
