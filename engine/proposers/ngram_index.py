"""A suffix automaton of one growing token sequence: where its longest suffix stood before.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text": at most two
states a token, O(1) amortised an append. The suffix link of the last state is the longest suffix
that occurred before; the links from there on are the shorter ones that occurred elsewhere too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

MOST_COUNTED = 64
"""Occurrences are counted up to this many, which bounds the work of an append."""
_SUFFIXES, _NEXT_TOKENS = 32, 64
"""Most suffixes, and most next tokens of one, that are looked at for continuations."""
_ONE = 1 << 32
_PLACE, _FULL = _ONE - 1, MOST_COUNTED * _ONE


class Continuation(NamedTuple):
    """What a text may go on with: tokens, up to k of them.

    match_tokens: length of the longest suffix that the first token has followed; match_count: how
    often that suffix was seen before; guess_count: how often the token followed it.
    """

    match_tokens: int
    match_count: int
    guess_count: int
    tokens: list[int]


class NgramIndex:
    """The automaton; token ids are 0 or more, and what follows a negative one is another text.

    State s spells the suffixes of one string of `length[s]` tokens down to `length[link[s]] + 1`;
    `rank[s]` is how often they ended, up to MOST_COUNTED, times 2**32, plus a position where they
    did: one number to order by. Most states have one transition, held in `only_token` and
    `only_state` (0: none, -1: several, in `many`): a dict a state would take four times the memory.

    match_tokens, match_count: length of the longest suffix that ended earlier, and how often.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.match_tokens, self.match_count = 0, 0
        self._only_token, self._only_state = array("i", [0]), array("i", [0])
        self._many: dict[int, dict[int, int]] = {}
        self._link, self._length = array("i", [-1]), array("i", [0])
        self._rank = array("q", [_FULL])
        self._last, self._match_end = 0, -1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def propose(self, k: int) -> list[int]:
        """Return the k tokens that followed the longest suffix before; empty without a match.

        Of several places it is the last where that suffix was itself the longest that matched.
        """
        return self._read(self._match_end + 1, k) if self.match_tokens else []

    def guess_count(self) -> int:
        """Return how often the first token of `propose` followed the longest suffix, or 0."""
        if not self.match_tokens:
            return 0
        to = self._next(self._link[self._last], self.tokens[self._match_end + 1])
        return self._rank[to] // _ONE

    def continuations(self, k: int, width: int) -> list[Continuation]:
        """Return up to width ways to go on, as `continuations_of` orders them."""
        suffix = max(self._link[self._last], 0)
        return self.continuations_of(suffix, self.match_tokens, k, width, here=1)

    def follow(self, state: int, length: int, tokens: Sequence[int], most: int) -> tuple[int, int]:
        """Return (state, length) of the longest suffix, up to `most`, of a text that goes on.

        state, length: of the text before `tokens`, (0, 0) for none. O(tokens) amortised. What came
        to the index meanwhile is only matched from here on: after `most` tokens wholly.
        """
        # One loop without calls, for it runs in every step of every request.
        only_token, only_state, many = self._only_token, self._only_state, self._many
        link, lengths = self._link, self._length
        while state and length <= lengths[link[state]]:
            state = link[state]  # it was split meanwhile
        for token in tokens:
            while True:
                to = only_state[state]
                if to < 0:
                    to = many[state].get(token, 0)
                elif to and only_token[state] != token:
                    to = 0
                if to or not state:
                    break
                state = link[state]
                length = lengths[state]
            if not to:
                continue
            state, length = to, length + 1
            if length > most:
                length = most
                while length <= lengths[link[state]]:
                    state = link[state]
        return state, length

    def continuations_of(
        self, state: int, match_tokens: int, k: int, width: int, here: int = 0, above: int = 0
    ) -> list[Continuation]:
        """Return what followed the string of match_tokens tokens in `state`, and its suffixes.

        Only those of more than `above` tokens; up to k tokens, at least 1, of up to width ways.

        Each begins with another token: longest match first, then most frequent, then seen last. At
        most 32 suffixes are tried, and of one that more than 64 tokens followed only the 64 that
        were new there last. here: 1 where the suffix is the index's own end, which nothing follows.
        """
        out: list[Continuation] = []
        rank, seen = self._rank, set[int]()
        for _ in range(_SUFFIXES if width > 0 else 0):
            if state <= 0 or match_tokens <= above:
                break
            for to in self._ranked(state):
                place = rank[to] & _PLACE
                token = self.tokens[place]
                if token < 0 or token in seen:
                    continue
                seen.add(token)
                tokens, count = self._read(place, k), rank[to] // _ONE
                times = max(rank[state] // _ONE - here, count)
                out.append(Continuation(match_tokens, times, count, tokens))
                if len(out) == width:
                    return out
            state = self._link[state]
            match_tokens = self._length[state]
        return out

    def _append(self, token: int) -> None:
        only_token, only_state, many = self._only_token, self._only_state, self._many
        link, rank = self._link, self._rank
        position = len(self.tokens)
        self.tokens.append(token)
        state = self._add(position + 1, _ONE + position)
        walk, seen = self._last, 0
        while walk >= 0:
            to = only_state[walk]
            if to == 0:
                only_token[walk], only_state[walk] = token, state
            elif to > 0:
                if only_token[walk] == token:
                    seen = to
                    break
                many[walk] = {only_token[walk]: to, token: state}
                only_state[walk] = -1
            elif (seen := many[walk].setdefault(token, state)) != state:
                break
            else:
                seen = 0
            walk = link[walk]
        self._last = state
        if seen and self._length[seen] != self._length[walk] + 1:
            seen = self._split(seen, walk, token)
        link[state] = seen
        self.match_tokens, known = self._length[seen], rank[seen]
        self.match_count, self._match_end = known // _ONE if seen else 0, known & _PLACE
        # It has now been seen here too. Its own suffixes keep an older place: that foretells a
        # little better than their latest (1.708 tokens a step against 1.701 on Vicuna's answers).
        rank[seen] += position - self._match_end
        # A suffix occurs more often the shorter it is: above one that is full, all are.
        while rank[seen] < _FULL:
            rank[seen] += _ONE
            seen = link[seen]

    def _split(self, seen: int, walk: int, token: int) -> int:
        """Give the shorter strings of `seen`, to which token leads from `walk`, their own state."""
        only_state, many, link = self._only_state, self._many, self._link
        clone = self._add(self._length[walk] + 1, self._rank[seen])
        self._only_token[clone], only_state[clone] = self._only_token[seen], only_state[seen]
        if seen in many:
            many[clone] = dict(many[seen])
        link[clone] = link[seen]
        link[seen] = clone
        while walk >= 0 and self._next(walk, token) == seen:
            if only_state[walk] > 0:
                only_state[walk] = clone
            else:
                many[walk][token] = clone
            walk = link[walk]
        return clone

    def _add(self, length: int, rank: int) -> int:
        self._only_token.append(0)
        self._only_state.append(0)
        self._link.append(0)
        self._length.append(length)
        self._rank.append(rank)
        return len(self._link) - 1

    def _next(self, state: int, token: int) -> int:
        """Return the state that token leads to; 0: none."""
        to = self._only_state[state]
        if to < 0:
            return self._many[state].get(token, 0)
        return to if to and self._only_token[state] == token else 0

    def _ranked(self, state: int) -> Iterator[int]:
        """Yield the states of what followed, most frequent first, then latest."""
        to = self._only_state[state]
        if to >= 0:
            if to:
                yield to
            return
        followed = list(islice(reversed(self._many[state].values()), _NEXT_TOKENS))
        best = max(followed, key=self._rank.__getitem__)
        yield best
        # Most callers take the best, which is found in half the time that sorting takes.
        followed.sort(key=self._rank.__getitem__, reverse=True)
        yield from followed[1:]

    def _read(self, start: int, k: int) -> list[int]:
        """Return k tokens from `start` on; past the end the text repeats what follows `start`."""
        guess = self.tokens[start : start + k].tolist()
        period = len(self.tokens) - start
        while len(guess) < k:
            guess.append(guess[len(guess) - period])
        return guess
