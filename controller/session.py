"""One engine's session: its policy, how far its history was heard, and the candidates beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parlay.controller.heard import Waiting
from parlay.policies.policy import EngineLimits, Policy, make_policy
from parlay.policies.types import StepOutcome
from parlay.protos.codec import Unread

if TYPE_CHECKING:
    from parlay.controller.trial import Trial


@dataclass(slots=True, frozen=True)
class Spec:
    """A policy by name with its settings, sorted by key; those left out keep their defaults."""

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    def make(self, limits: EngineLimits | None = None) -> Policy:
        """Return a new policy; raises ValueError where name, settings or limits do not fit."""
        return make_policy(self.name, dict(self.settings), limits)


def spec_of(name: str, settings: Mapping[str, str] | None = None) -> Spec:
    """Return the spec of a policy with settings as pairs."""
    return Spec(name, tuple(sorted((settings or {}).items())))


@dataclass(slots=True)
class Counts:
    """What a session has seen: outcomes learned from, ignored (repeated or out of order), plans."""

    outcomes: int = 0
    ignored_outcomes: int = 0
    plans: int = 0
    ignored_views: int = 0
    hellos: int = 0


@dataclass(slots=True)
class Session:
    """One engine: its policy, how far its history was heard, and the stream that steers it.

    trials: candidates beside the policy, empty most of the time; kept: policies that were active
    before, as they were left; plans_before: plans that were not made by `policy`; put_off: an
    outcome that is to be read and learned from once its engine has its plan; ended: its stream has,
    and no other has come.
    """

    policy: Policy
    limits: EngineLimits
    run_id: int
    stream: int = 0
    last_outcome: int = -1
    last_view: int = -1
    counts: Counts = field(default_factory=Counts)
    engine_id: str = ""
    waiting: Waiting = field(default_factory=Waiting)
    spec: Spec = Spec("")
    trials: list[Trial] = field(default_factory=list)
    kept: dict[Spec, Policy] = field(default_factory=dict)
    plans_before: int = 0
    state_version: int = 0
    put_off: StepOutcome | Unread | None = None
    ended: bool = False

    def restart(self, run_id: int) -> None:
        """Begin a new run of step ids; what was learned stays."""
        self.run_id, self.last_outcome, self.last_view = run_id, -1, -1
        self.waiting = Waiting()
        for trial in self.trials:
            trial.restart()
