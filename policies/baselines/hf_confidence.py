"""Stop drafting behind a token that the draft model gives too little probability.

Source: Hugging Face transformers, `assistant_confidence_threshold` .4, and its update while running
(more than 5 tokens seen): the threshold that makes FPR + 3 FNR least, where a token is called good
at or above it and was good if it held. Confidences reported are the largest probability of each
place, the token's own when greedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import check_k
from parlay.policies.baselines.stopper import stopped
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import (
    DRAFT_MODEL,
    Array,
    BatchView,
    Plan,
    StepOutcome,
    StopKind,
    StopRule,
)

_LEAST_SAMPLES = 5
_SAMPLES = 1000
_MISSED_WEIGHT = 3.0


@dataclass(slots=True, frozen=True)
class HfConfidenceSettings:
    """threshold to start with; k_max, most tokens drafted; online, whether it moves."""

    threshold: float = 0.4
    k_max: int = 20
    online: bool = True

    def __post_init__(self) -> None:
        check_k("hf_confidence", "k_max", self.k_max, least=1)
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(
                f"hf_confidence: threshold must be between 0 and 1, not {self.threshold}"
            )


def best_threshold(confidence: Array, good: Array) -> float:
    """Return the candidate with the least FPR + 3 FNR; confidence f64 and good bool [samples].

    Candidates are the confidences seen, and above them all; ties go to the highest. A rate without
    samples is 0.
    """
    candidates = np.append(np.unique(confidence), np.inf)
    called = confidence >= candidates[:, None]
    bad, right = max(int((~good).sum()), 1), max(int(good.sum()), 1)
    wrongly_called = (called & ~good).sum(axis=1) / bad
    missed = (~called & good).sum(axis=1) / right
    cost = wrongly_called + _MISSED_WEIGHT * missed
    return float(min(candidates[np.flatnonzero(cost == cost.min())[-1]], 1.0))


@register("hf_confidence", HfConfidenceSettings)
class HfConfidence(Stateless):
    """Keeps the newest tokens' confidences and whether they held."""

    name = "hf_confidence"

    def __init__(self, settings: HfConfidenceSettings, limits: EngineLimits) -> None:
        self.k, self.online = max(1, min(settings.k_max, limits.k_max)), settings.online
        self.threshold = settings.threshold
        self.confidence, self.good = np.zeros(0), np.zeros(0, bool)

    def decide(self, view: BatchView) -> Plan:
        """Return the one plan."""
        return stopped(view, self.k, StopRule(StopKind.PROBABILITY, self.threshold))

    def observe(self, outcome: StepOutcome) -> None:
        """Add the tokens that were judged: those that held, and the first that did not."""
        place = np.arange(outcome.confidences.shape[1])
        judged = place < np.minimum(outcome.accepted + 1, outcome.verified_k)[:, None]
        judged &= (outcome.proposer == DRAFT_MODEL)[:, None] & np.isfinite(outcome.confidences)
        held = np.broadcast_to(place < outcome.accepted[:, None], judged.shape)
        self.confidence = np.append(self.confidence, outcome.confidences[judged])[-_SAMPLES:]
        self.good = np.append(self.good, held[judged])[-_SAMPLES:]
        if self.online and judged.any() and len(self.good) > _LEAST_SAMPLES:
            self.threshold = best_threshold(self.confidence, self.good)

    def state(self) -> dict[str, Array]:
        """Return the threshold and the samples behind it."""
        return {
            "threshold": np.asarray(self.threshold),
            "confidence": self.confidence.copy(),
            "good": self.good.copy(),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if set(state) != set(self.state()) or np.shape(state["good"]) != np.shape(
            state["confidence"]
        ):
            raise ValueError("hf_confidence: the state is incomplete or of another policy")
        self.threshold = float(state["threshold"])
        self.confidence = np.array(state["confidence"], float)
        self.good = np.array(state["good"], bool)
