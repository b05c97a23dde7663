"""One k for the batch, moved up and down a ladder by an average of what was accepted.

Source: SGLang's adaptive speculative steps. Each range of batch sizes has a ladder of k and a place
on it. The average accepted length (exponential, alpha .2) is looked at every 5 batches, after 10 to
warm up: down to the tier below where it is at most that tier - .5 - .25, up where it is above the
present tier - .5. Ladders by smallest batch: 1: 1 3 5 7, 8: 0 1 3, 32: 0 1, 64: 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import batch_plan, drafter, slot_of
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import Array, BatchView, Plan, Reason, StepOutcome

_LEAST = np.array([1, 8, 32, 64])
_LADDERS = ((1, 3, 5, 7), (0, 1, 3), (0, 1), (0,))
_ALPHA = 0.2
_WARM_UP = 10
_EVERY = 5
_DOWN, _UP, _SLACK = 0.5, 0.5, 0.25
_START_K = 3


@dataclass(slots=True, frozen=True)
class EmaTiersSettings:
    """proposer."""

    proposer: str = "draft_model"

    def __post_init__(self) -> None:
        drafter("ema_tiers", self.proposer)


@register("ema_tiers", EmaTiersSettings)
class EmaTiers(Stateless):
    """Keeps, for each range of batch sizes, a tier, an average and a count of batches."""

    name = "ema_tiers"

    def __init__(self, settings: EmaTiersSettings, limits: EngineLimits) -> None:
        self.proposer, self.k_max = drafter("ema_tiers", settings.proposer), limits.k_max
        self.tier = np.array([_highest(ladder, _START_K) for ladder in _LADDERS])
        self.average = np.array([float(_LADDERS[s][t]) for s, t in enumerate(self.tier)])
        self.batches = np.zeros(len(_LADDERS), np.int64)

    def decide(self, view: BatchView) -> Plan:
        """Return the present tier of this batch size for every row."""
        slot = slot_of(_LEAST, max(view.running, len(view)))
        k = min(_LADDERS[slot][self.tier[slot]], self.k_max)
        return batch_plan(view, self.proposer, k, Reason.HEURISTIC)

    def observe(self, outcome: StepOutcome) -> None:
        """Average what was accepted; move where it is time."""
        emits = outcome.emitted > 0
        if not emits.any():
            return
        slot = slot_of(_LEAST, len(outcome))
        self.average[slot] += _ALPHA * (float(outcome.accepted[emits].mean()) - self.average[slot])
        self.batches[slot] += 1
        if self.batches[slot] > _WARM_UP and self.batches[slot] % _EVERY == 0:
            self._move(slot)

    def _move(self, slot: int) -> None:
        ladder, tier, average = _LADDERS[slot], int(self.tier[slot]), self.average[slot]
        if tier > 0 and average <= ladder[tier - 1] - _DOWN - _SLACK:
            self.tier[slot] = tier - 1
        elif tier + 1 < len(ladder) and average > ladder[tier] - _UP:
            self.tier[slot] = tier + 1

    def state(self) -> dict[str, Array]:
        """Return tiers, averages and counts."""
        return {
            "tier": self.tier.copy(),
            "average": self.average.copy(),
            "batches": self.batches.copy(),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        own = self.state()
        if set(state) != set(own) or any(np.shape(state[k]) != own[k].shape for k in own):
            raise ValueError("ema_tiers: the state is incomplete or of another policy")
        if any(not 0 <= t < len(ladder) for t, ladder in zip(state["tier"], _LADDERS, strict=True)):
            raise ValueError("ema_tiers: the state names a tier that there is not")
        self.tier = np.array(state["tier"], np.int64)
        self.average = np.array(state["average"], float)
        self.batches = np.array(state["batches"], np.int64)


def _highest(ladder: tuple[int, ...], k: int) -> int:
    return max(i for i, tier in enumerate(ladder) if tier <= k or i == 0)
