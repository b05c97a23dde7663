"""What a plugin did, counted the same way for every engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlay.policies.types import PROPOSERS, Array, PlanSource, Proposer


@dataclass(slots=True)
class Counters:
    """Since the start: steps observed; plans by source (default: none, nobody speculated); drafted
    and accepted tokens by proposer; emitted tokens; fallbacks to the engine's own ways by reason;
    errors of the policy; time in the adapter on the engine's thread, in all, at most in one call,
    and of that the policy's (or the sidecar's client's).
    """  # noqa: D205

    steps: int = 0
    emitted: int = 0
    errors: int = 0
    plans: Counter[PlanSource] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    _drafted: list[int] = field(default_factory=lambda: [0] * PROPOSERS)
    _accepted: list[int] = field(default_factory=lambda: [0] * PROPOSERS)
    inside_us: float = 0.0
    inside_most_us: float = 0.0
    policy_us: float = 0.0

    @property
    def drafted(self) -> Array:
        """Return the tokens drafted, i64 [PROPOSERS]."""
        return np.asarray(self._drafted, np.int64)

    @property
    def accepted(self) -> Array:
        """Return those of them that were accepted, i64 [PROPOSERS]."""
        return np.asarray(self._accepted, np.int64)

    def add(self, proposer: int, drafted: int, accepted: int) -> None:
        """Count the drafts of one request in one step."""
        self._drafted[proposer] += drafted
        self._accepted[proposer] += accepted

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
            "drafted_tokens": {p.name.lower(): self._drafted[p] for p in drafting},
            "accepted_tokens": {p.name.lower(): self._accepted[p] for p in drafting},
            "plans": {s.name.lower(): self.plans[s] for s in PlanSource},
            "fallbacks": dict(self.fallbacks),
            "errors": self.errors,
            "inside_us": self.inside_us,
            "inside_most_us": self.inside_most_us,
            "policy_us": self.policy_us,
        }
