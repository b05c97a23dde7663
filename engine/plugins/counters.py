"""What a plugin did, counted the same way for every engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlay.policies.types import PROPOSERS, Array, PlanSource, Proposer, StepOutcome


@dataclass(slots=True)
class Counters:
    """Since the start: steps observed; plans by source (default: none, nobody speculated); drafted
    and accepted tokens by proposer; emitted tokens; fallbacks to the engine's own ways by reason;
    errors of the policy; time in the adapter on the engine's thread, in all and at most in one
    call.
    """  # noqa: D205

    steps: int = 0
    emitted: int = 0
    errors: int = 0
    plans: Counter[PlanSource] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    drafted: Array = field(default_factory=lambda: np.zeros(PROPOSERS, np.int64))
    accepted: Array = field(default_factory=lambda: np.zeros(PROPOSERS, np.int64))
    inside_us: float = 0.0
    inside_most_us: float = 0.0

    def add(self, outcome: StepOutcome) -> None:
        """Count one step."""
        self.steps += 1
        self.emitted += int(outcome.emitted.sum())
        np.add.at(self.drafted, outcome.proposer, outcome.drafted_k)
        np.add.at(self.accepted, outcome.proposer, outcome.accepted)

    def spent(self, us: float) -> None:
        """Count the time of one call of the adapter."""
        self.inside_us += us
        self.inside_most_us = max(self.inside_most_us, us)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, names in lower case."""
        drafting = [p for p in Proposer if p]
        return {
            "steps": self.steps,
            "emitted_tokens": self.emitted,
            "drafted_tokens": {p.name.lower(): int(self.drafted[p]) for p in drafting},
            "accepted_tokens": {p.name.lower(): int(self.accepted[p]) for p in drafting},
            "plans": {s.name.lower(): self.plans[s] for s in PlanSource},
            "fallbacks": dict(self.fallbacks),
            "errors": self.errors,
            "inside_us": self.inside_us,
            "inside_most_us": self.inside_most_us,
        }
