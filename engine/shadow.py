"""Score the n-gram on what was committed although it did not draft: full information for nothing.

A guess is kept while it matches and until its end is reached, over as many steps as that takes;
each request has one guess pending. What could not be seen yet is never reported (censoring).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.engine.backend import Lookup
from parlay.engine.request import Request
from parlay.policies.types import Array, Proposer, ShadowKind, ShadowRows

SHADOW_TOKENS = 8
"""Longest guess kept: deeper positions cost more steps of waiting than they teach."""


@dataclass(slots=True)
class _Pending:
    """A guess that began at output position `start` of a request's tokens."""

    start: int
    tokens: list[int]
    match_tokens: int


class ShadowScorer:
    """Keeps one pending guess a request and reports it once it is decided."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def offer(self, requests: list[Request], lookup: Lookup, rows: Array) -> None:
        """Take the guesses of `rows`, bool, made before the step, unless one is pending."""
        for row in np.flatnonzero(rows & (lookup.match_tokens > 0)):
            request = requests[row]
            if request.request_id not in self._pending:
                guess = [int(t) for t in lookup.tokens[row, :SHADOW_TOKENS] if t >= 0]
                match = int(lookup.match_tokens[row])
                self._pending[request.request_id] = _Pending(len(request.tokens), guess, match)

    def score(self, requests: list[Request]) -> ShadowRows:
        """Compare with what was committed; return the guesses that are decided."""
        rows: list[tuple[int, int, int, int, int]] = []
        for request in requests:
            guess = self._pending.get(request.request_id)
            if guess is None:
                continue
            offered = len(guess.tokens)
            seen = request.tokens[guess.start : guess.start + offered]
            matched = next(
                (i for i, (a, b) in enumerate(zip(guess.tokens, seen, strict=False)) if a != b),
                len(seen),
            )
            if matched == len(seen) < offered and not request.finished:
                continue
            del self._pending[request.request_id]
            if seen:
                observed = min(matched + 1, len(seen))
                rows.append((request.request_id, offered, matched, observed, guess.match_tokens))
        return _columns(rows)

    def forget(self, request_id: int) -> None:
        """Drop a request's pending guess."""
        self._pending.pop(request_id, None)


def _columns(rows: list[tuple[int, int, int, int, int]]) -> ShadowRows:
    request_id, offered, matched, observed, match = zip(*rows, strict=True) if rows else ((),) * 5
    return ShadowRows(
        request_id=np.asarray(request_id, np.uint64),
        proposer=np.full(len(rows), Proposer.NGRAM, np.uint8),
        offered_k=np.asarray(offered, np.int16),
        matched=np.asarray(matched, np.float32),
        observed=np.asarray(observed, np.int16),
        match_tokens=np.asarray(match, np.int32),
        kind=np.full(len(rows), ShadowKind.MATCH, np.uint8),
    )
