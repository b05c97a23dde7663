"""Score proposers that did not draft on what was committed: full information for little or nothing.

The n-gram is scored in every step, Medusa heads beside rows that they draft for and else now and
then, the draft model where the plan asks. A guess is kept while it matches and until its end is
reached, over as many steps as that takes; each request has one pending of each proposer. What could
not be seen yet is never reported (censoring). The n-gram and heads guess point masses, which match
as often as they would be accepted, however the target's token is drawn. A token that the draft
model draws for rejection sampling would say little: there the overlap sum min(p, q) of target's and
draft's laws is scored, the chance that any token drawn from q is accepted (Leviathan et al.,
2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parlay.engine.backend import Lookup
from parlay.engine.request import Request, SampleMode
from parlay.policies.types import Array, BatchView, Fitted, Proposer, ShadowKind, ShadowRows

SHADOW_TOKENS = 8
"""Longest guess kept: deeper positions cost more steps of waiting than they teach."""
SHADOW_PASSES = 3
"""Longest guess asked of the draft model, where each token costs a pass."""
HEADS_STEPS = 16
"""Heads that nothing drafts with are watched once in so many steps: their weights are read for it,
which takes as long for one row as for many."""
_DRAFT, _NGRAM, _MEDUSA = Proposer.DRAFT_MODEL, Proposer.NGRAM, Proposer.MEDUSA
_SCORED = (_NGRAM, _DRAFT, _MEDUSA)

_Row = tuple[int, int, int, float, int, int, int]


@dataclass(slots=True)
class _Pending:
    """A guess that began at position `start` of a request's tokens."""

    start: int
    tokens: list[int]
    match_tokens: int


class ShadowScorer:
    """Keeps one pending guess a request and proposer, and reports it once it is decided."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, Proposer], _Pending] = {}

    def asks(self, requests: Sequence[Request], max_k: Array, rows: Array) -> Array:
        """Return i32 [rows]: how many tokens the draft model is to guess for `rows`, bool.

        None where a guess is pending; one where overlaps are scored.
        """
        asked = np.zeros(len(requests), np.int32)
        for row in np.flatnonzero(rows).tolist():
            request = requests[row]
            if (request.request_id, _DRAFT) not in self._pending:
                single = request.sampling.mode is SampleMode.REJECTION
                asked[row] = min(1 if single else SHADOW_PASSES, int(max_k[row]))
        return asked

    def asks_heads(self, requests: Sequence[Request], view: BatchView, fit: Fitted) -> Array:
        """Return i32 [rows]: how many tokens heads are to guess for rows that they do not draft
        for, none where a guess is pending; [0] where this is no step to watch them in.
        """  # noqa: D205
        drafts = (fit.proposer == _MEDUSA) & (fit.k > 0)
        if view.step_id % HEADS_STEPS and not drafts.any():
            return np.zeros(0, np.int32)
        asked = np.zeros(len(requests), np.int32)
        for row in np.flatnonzero(view.allows(_MEDUSA) & ~drafts).tolist():
            if (requests[row].request_id, _MEDUSA) not in self._pending:
                asked[row] = min(SHADOW_TOKENS, int(view.max_k[row]))
        return asked

    def offer(self, requests: Sequence[Request], lookup: Lookup, rows: Array) -> None:
        """Take the n-gram's guesses for `rows`, bool, made before the step, unless one pends."""
        for row in np.flatnonzero(rows & (lookup.match_tokens > 0)).tolist():
            guess = [int(t) for t in lookup.tokens[row, :SHADOW_TOKENS] if t >= 0]
            self._keep(requests[row], _NGRAM, guess, int(lookup.match_tokens[row]))

    def watch(
        self,
        requests: Sequence[Request],
        guesses: Mapping[int, list[int]],
        proposer: Proposer = Proposer.DRAFT_MODEL,
    ) -> None:
        """Take a proposer's guesses, by row, made before the step only to be watched."""
        for row, guess in guesses.items():
            self._keep(requests[row], proposer, guess, 0)

    def score(
        self, requests: Sequence[Request], overlaps: Mapping[int, float] | None = None
    ) -> ShadowRows:
        """Compare with what was committed; return the guesses that are decided.

        overlaps: sum min(p, q) of the draft model's law for the step's first token, by row.
        """
        rows: list[_Row] = []
        for request in requests:
            for proposer in _SCORED:
                rows += self._decided(request, proposer)
        for row, overlap in (overlaps or {}).items():
            kind = int(ShadowKind.OVERLAP)
            rows.append((requests[row].request_id, int(_DRAFT), 1, overlap, 1, 0, kind))
        return _columns(rows)

    def forget(self, request_id: int) -> None:
        """Drop a request's pending guesses."""
        for proposer in _SCORED:
            self._pending.pop((request_id, proposer), None)

    def _keep(self, request: Request, proposer: Proposer, guess: list[int], match: int) -> None:
        kept = _Pending(len(request.tokens), guess, match)
        self._pending.setdefault((request.request_id, proposer), kept)

    def _decided(self, request: Request, proposer: Proposer) -> list[_Row]:
        """Return what became of a pending guess, nothing where more of it may still be seen."""
        guess = self._pending.get((request.request_id, proposer))
        if guess is None:
            return []
        offered = len(guess.tokens)
        seen = request.tokens[guess.start : guess.start + offered]
        matched = next(
            (i for i, (a, b) in enumerate(zip(guess.tokens, seen, strict=False)) if a != b),
            len(seen),
        )
        if matched == len(seen) < offered and not request.finished:
            return []
        del self._pending[(request.request_id, proposer)]
        if not seen:
            return []
        observed, kind = min(matched + 1, len(seen)), int(ShadowKind.MATCH)
        return [
            (
                request.request_id,
                int(proposer),
                offered,
                matched,
                observed,
                guess.match_tokens,
                kind,
            )
        ]


def _columns(rows: list[_Row]) -> ShadowRows:
    kinds = (np.uint64, np.uint8, np.int16, np.float32, np.int16, np.int32, np.uint8)
    columns = zip(*rows, strict=True) if rows else ((),) * len(kinds)
    return ShadowRows(*(np.asarray(c, k) for c, k in zip(columns, kinds, strict=True)))
