"""Where the policies stand: which is active, what a promotion came to, and what cannot be now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parlay.controller.candidate import Ratio
from parlay.controller.session import Spec


class UnknownEngine(ValueError):
    """No Hello was heard from this engine."""


class NotNow(ValueError):
    """The step does not follow from where the policies stand."""


@dataclass(slots=True, frozen=True)
class Standing:
    """The active policy, and engines that have one of their own."""

    spec: Spec
    own: Mapping[str, Spec] = field(default_factory=dict)

    def of(self, engine_id: str) -> Spec:
        """Return the policy that is active on an engine."""
        return self.own.get(engine_id, self.spec)


@dataclass(slots=True, frozen=True)
class Verdict:
    """Whether a candidate was promoted, the measurement behind it, and both in words."""

    promoted: bool
    speed: Ratio
    words: str
