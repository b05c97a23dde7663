"""What a step showed of each proposer: verified drafts, shadow rows and stopped drafts alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from parlay.policies.types import PROPOSERS, Array, ShadowKind, StepOutcome

_MATCH = int(ShadowKind.MATCH)


@dataclass(slots=True)
class Drafts:
    """What one draft showed, a row each.

    row: of the caller's table of requests; proposer; match_tokens; accepted, how many tokens held;
    seen, how many positions could be observed; share f64, how much of a rejection its failure is
    (below 1 where a stopped draft stands on the drafter's own estimate).
    """

    row: Array
    proposer: Array
    match_tokens: Array
    accepted: Array
    seen: Array
    share: Array


@dataclass(slots=True)
class Draft:
    """What a single draft showed; fields as in `Drafts`."""

    row: int
    proposer: int
    match_tokens: int
    accepted: int
    seen: int
    share: float


def draft_of(outcome: StepOutcome, row: int, doubt: Array | None) -> Draft | None:
    """Return what `drafts_of` does of an outcome of one row and no shadow; None without a draft."""
    proposer, accepted = int(outcome.proposer[0]), int(outcome.accepted[0])
    seen, share = int(outcome.verified_k[0]), 1.0
    if doubt is not None and accepted == seen and np.isfinite(doubt[0]):
        seen, share = seen + 1, float(doubt[0])
    if seen <= 0 or row < 0 or not 0 < proposer < PROPOSERS:
        return None
    return Draft(row, proposer, int(outcome.match_tokens[0]), accepted, seen, share)


def drafts_of(outcome: StepOutcome, rows: Array, shadows: Array, doubt: Array | None) -> Drafts:
    """Collect the drafts of a step.

    rows, shadows i64: the caller's row of each row of the outcome and of its shadow, -1 unknown.
    doubt f64 [rows]: P(reject) of the place where a draft was stopped short, nan elsewhere.
    """
    verified, share = outcome.verified_k, np.ones(len(outcome))
    if doubt is not None:
        stopped = np.isfinite(doubt) & (outcome.accepted == outcome.verified_k)
        verified, share = verified + stopped, np.where(stopped, doubt, 1.0)
    used = ((verified > 0) & _known(rows, outcome.proposer)).nonzero()[0]
    shadow = outcome.shadow
    match = np.zeros(0, np.intp)
    if len(shadow):
        shown = (shadow.kind == _MATCH) & (shadow.observed > 0)
        match = (shown & _known(shadows, shadow.proposer)).nonzero()[0]

    def both(mine: Array, shadowed: Array) -> Array:
        if not len(match):
            only: Array = mine[used]
            return only
        return np.concatenate([mine[used], shadowed[match]])

    return Drafts(
        row=both(rows, shadows),
        proposer=both(outcome.proposer, shadow.proposer).astype(np.intp),
        match_tokens=both(outcome.match_tokens, shadow.match_tokens),
        accepted=both(outcome.accepted, shadow.matched).astype(np.int64),
        seen=both(verified, shadow.observed).astype(np.int64),
        share=both(share, np.ones(len(shadow))),
    )


def merged(parts: Sequence[Drafts]) -> Drafts:
    """Return the drafts of some steps as one."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(Drafts)]
    return Drafts(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def _known(row: Array, proposer: Array) -> Array:
    """Return bool [n]: the request has a row, and the proposer is one that drafts."""
    known: Array = (row >= 0) & (proposer > 0) & (proposer < PROPOSERS)
    return known
