"""A policy on trial: where it stands, what was measured of it, and when that is too much loss.

One candidate is tried on every engine that follows the active policy; they are taken for replicas
of one another, and their measurements are pooled. Speed is measured by switch-back blocks of the
whole batch, safety by pairs of requests. Both give log-ratios whose noise is symmetric, for which
`policies.confidence` has bounds that hold however often one looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from parlay.controller.session import Spec
from parlay.policies.confidence import GainSequence

ALPHA = 0.05
"""Chance that a bound is ever wrong while the ratio stays as it is."""
LOSS_STEPS, LOSS_SHARE = 32.0, 0.01
"""A trial may lose so many usual steps, and such a share of the time measured, to the incumbent."""
REQUEST_LOSS = 0.1
"""Requests on canary must not surely have lost more than this share of the others' goodput."""


class Stage(IntEnum):
    """Where a policy stands; the numbers are those of the wire."""

    IDLE = 0
    SHADOW = 1
    CANARY = 2
    ACTIVE = 3


@dataclass(slots=True, frozen=True)
class Pair:
    """What a pair of blocks says: the candidate's log goodput ratio, and what its block lost.

    lost_ms: the candidate's block beyond the incumbent's time for its tokens, below 0 where it
    gained; elapsed_ms: both blocks; step_ms: a usual step.
    """

    log_ratio: float
    lost_ms: float
    elapsed_ms: float
    step_ms: float


@dataclass(slots=True, frozen=True)
class Ratio:
    """The candidate's goodput over the incumbent's, with bounds at 1 - ALPHA each.

    nan, 0 and infinity where there are none yet.
    """

    ratio: float
    low: float
    high: float
    pairs: int


@dataclass(slots=True)
class Candidate:
    """One policy on trial.

    share: of requests, on canary; rows, agreed, their_k, our_k: rows for which both decided, those
    alike, and summed k of incumbent and candidate.
    """

    spec: Spec
    stage: Stage
    share: float = 0.0
    switch_back: bool = False
    decisions: int = 0
    state_version: int = 0
    rows: int = 0
    agreed: int = 0
    their_k: int = 0
    our_k: int = 0
    lost_ms: float = 0.0
    speed: GainSequence = field(default_factory=lambda: GainSequence(ALPHA))
    requests: GainSequence = field(default_factory=lambda: GainSequence(ALPHA))

    def forget(self) -> None:
        """Drop what was measured: against another incumbent it says nothing."""
        self.rows = self.agreed = self.their_k = self.our_k = 0
        self.lost_ms = 0.0
        self.speed, self.requests = GainSequence(ALPHA), GainSequence(ALPHA)

    def compared(self, pair: Pair) -> str:
        """Learn a pair of blocks; return why the trial must end, or nothing."""
        self.speed.add(pair.log_ratio)
        allowed_ms = LOSS_SHARE * pair.elapsed_ms
        self.lost_ms = max(0.0, self.lost_ms + pair.lost_ms - allowed_ms)
        if self.speed.upper < 0.0:
            return f"slower than the incumbent: {in_words(ratio_of(self.speed), 'blocks')}"
        if self.lost_ms > LOSS_STEPS * pair.step_ms:
            return (
                f"lost {self.lost_ms:.0f} ms to the incumbent, more than"
                f" {LOSS_STEPS:.0f} steps of {pair.step_ms:.1f} ms"
            )
        return ""

    def ended(self, log_ratio: float) -> str:
        """Learn a pair of requests that ended; return why the trial must end, or nothing."""
        self.requests.add(log_ratio)
        if self.requests.upper < math.log1p(-REQUEST_LOSS):
            found = in_words(ratio_of(self.requests), "requests")
            return f"its requests lost more than {REQUEST_LOSS:.0%}: {found}"
        return ""


def ratio_of(gains: GainSequence) -> Ratio:
    """Return a sequence of log-ratios as a ratio with its bounds."""
    mean = math.exp(gains.mean) if gains.count else math.nan
    return Ratio(mean, math.exp(gains.lower), math.exp(gains.upper), gains.count)


def in_words(found: Ratio, what: str) -> str:
    """Return a ratio as `goodput x.xxx of the incumbent's [low, high] in n pairs of what`."""
    if not found.pairs:
        return f"no pairs of {what} were measured yet"
    return (
        f"goodput {found.ratio:.3f} of the incumbent's"
        f" [{found.low:.3f}, {found.high:.3f}] in {found.pairs} pairs of {what}"
    )
