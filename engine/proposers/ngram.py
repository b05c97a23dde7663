"""N-gram proposer: what followed the text's longest suffix when it was last seen. Free of torch.

A suffix automaton (Blumer et al. 1985) grows with the text, O(1) amortised a token; the suffix link
of its last state is the longest suffix that occurred before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parlay.engine.backend import Lookup
from parlay.engine.request import Request


class NgramIndex:
    """The suffix automaton of one token sequence.

    State s spells its longest string of `length[s]` tokens; `recent[s]` is a position where it
    ended.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._recent = [-1]
        self._last = 0
        self.match_tokens, self._match_end = 0, -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        nxt, link, length, recent = self._next, self._link, self._length, self._recent
        position = len(self.tokens)
        self.tokens.append(token)
        state = self._add({}, 0, length[self._last] + 1, position)
        walk = self._last
        while walk >= 0 and token not in nxt[walk]:
            nxt[walk][token] = state
            walk = link[walk]
        self._last = state
        if walk >= 0:
            seen = nxt[walk][token]
            if length[seen] != length[walk] + 1:
                clone = self._add(dict(nxt[seen]), link[seen], length[walk] + 1, recent[seen])
                link[seen] = clone
                while walk >= 0 and nxt[walk].get(token) == seen:
                    nxt[walk][token] = clone
                    walk = link[walk]
                seen = clone
            link[state] = seen
        suffix = link[state]
        self.match_tokens, self._match_end = length[suffix], recent[suffix]
        # The suffix has now been seen here too; the freshest place predicts best.
        recent[suffix] = position

    def _add(self, transitions: dict[int, int], link: int, length: int, recent: int) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._recent.append(recent)
        return len(self._link) - 1

    def propose(self, k: int) -> list[int]:
        """Return the k tokens that followed the longest suffix before; empty without a match."""
        if not self.match_tokens:
            return []
        start = self._match_end + 1
        guess = self.tokens[start : start + k]
        period = len(self.tokens) - start
        # The text repeats with this period up to its end: go on repeating it.
        while len(guess) < k:
            guess.append(guess[len(guess) - period])
        return guess


class NgramProposer:
    """An index for every live request, brought up to date when it is asked.

    By request, not its id: engines that share a backend each count their ids from 1.
    """

    def __init__(self) -> None:
        self._indexes: dict[Request, NgramIndex] = {}

    def lookup(self, requests: Sequence[Request], depth: int) -> Lookup:
        """Return the guesses for requests whose every token but the last is computed."""
        match = np.zeros(len(requests), np.int32)
        tokens = np.full((len(requests), depth), -1, np.int64)
        for row, request in enumerate(requests):
            if request.pending > 1:
                continue
            index = self._indexes.get(request)
            if index is None:
                index = self._indexes[request] = NgramIndex()
            index.extend(request.tokens[len(index.tokens) :])
            match[row] = index.match_tokens
            if index.match_tokens:
                tokens[row] = index.propose(depth)
        return Lookup(match, tokens)

    def forget(self, request: Request) -> None:
        """Drop a request's index."""
        self._indexes.pop(request, None)
