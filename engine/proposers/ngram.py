"""N-gram proposer: what followed the text's longest suffix where it was seen. Free of torch.

A suffix automaton (`ngram_index.py`) grows with each request's text; if wished, what it lacks is
looked up in a corpus of earlier outputs (`shared_corpus.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.engine.backend import Lookup
from parlay.engine.proposers.ngram_index import NgramIndex
from parlay.engine.proposers.shared_corpus import (
    LONGEST_WORTH,
    CorpusReader,
    SharedCorpus,
    merged,
)
from parlay.engine.request import Request
from parlay.policies.types import Array

__all__ = ["Candidates", "NgramIndex", "NgramProposer"]


@dataclass(slots=True, frozen=True)
class Candidates:
    """Continuations of one text, the best first, no two with the same first token.

    tokens i64 [n, k], -1 beyond a continuation's end. i32 [n]: match_tokens, the longest suffix
    that the first token followed before (in the shared corpus: what it is worth); match_count, how
    often that suffix was seen; guess_count, how often the token followed it. Both counts go up to
    MOST_COUNTED.
    """

    tokens: Array
    match_tokens: Array
    match_count: Array
    guess_count: Array


class NgramProposer:
    """An index for every live request, brought up to date when it is asked.

    By request, not its id: engines that share a backend each count their ids from 1. Only committed
    tokens are indexed, and those are never taken back.

    corpus_tokens: how many tokens of finished outputs all requests may be guessed from; 0 is off.
    Sharing lets a request's speed tell what others were answered. Raises ValueError for 1 to 3.
    texts: token ids of texts that they may be guessed from besides, kept for good.
    """

    def __init__(self, corpus_tokens: int = 0, texts: Sequence[Sequence[int]] = ()) -> None:
        shared = corpus_tokens or len(texts)
        self.corpus = SharedCorpus(corpus_tokens, texts) if shared else None
        self._indexes: dict[Request, NgramIndex] = {}
        self._readers: dict[Request, CorpusReader] = {}

    def lookup(self, requests: Sequence[Request], depth: int) -> Lookup:
        """Return the guesses for requests whose every token but the last is computed.

        The prompts of the others are indexed as far as they are computed, not all in one step.
        """
        match, seen, followed = (np.zeros(len(requests), np.int32) for _ in range(3))
        tokens = np.full((len(requests), depth), -1, np.int64)
        for row, request in enumerate(requests):
            if request.pending > 1:
                self._index(request, request.computed)
                continue
            index = self._index(request, len(request.tokens))
            if own := index.match_tokens:
                match[row], seen[row], followed[row] = own, index.match_count, index.guess_count()
                tokens[row] = index.propose(depth)
            reader = self._reader(request)
            if reader is None or own >= LONGEST_WORTH:
                continue
            if found := reader.continuations(depth, 1, beyond=own):
                match[row], seen[row], followed[row], guess = found[0]
                tokens[row] = guess + [-1] * (depth - len(guess))
        return Lookup(match, tokens, seen, followed)

    def candidates(self, request: Request, k: int, width: int) -> Candidates:
        """Return up to width continuations of k tokens, by match length, then by count."""
        found = self._index(request, len(request.tokens)).continuations(k, width)
        if (reader := self._reader(request)) is not None:
            # As in `lookup`, an own match goes before one that is worth no more.
            beyond = found[-1].match_tokens if len(found) == width else 0
            found = merged(found, reader.continuations(k, width, beyond), width)
        tokens = np.full((len(found), k), -1, np.int64)
        for row, one in enumerate(found):
            tokens[row, : len(one.tokens)] = one.tokens
        counts = [(c.match_tokens, c.match_count, c.guess_count) for c in found]
        match, seen, followed = np.asarray(counts, np.int32).reshape(-1, 3).T
        return Candidates(tokens, match, seen, followed)

    def forget(self, request: Request) -> None:
        """Drop a request's index; what a finished one was answered goes to the corpus."""
        index = self._indexes.pop(request, None)
        self._readers.pop(request, None)
        if index is not None and self.corpus is not None and request.finished:
            self.corpus.add(request.output)

    def _index(self, request: Request, end: int) -> NgramIndex:
        """Return the request's index with its tokens up to `end` in it."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NgramIndex()
        assert len(index.tokens) <= len(request.tokens), "committed tokens were taken back"
        index.extend(request.tokens[len(index.tokens) : end])
        return index

    def _reader(self, request: Request) -> CorpusReader | None:
        """Return what has read the request's tokens in the corpus, None without one."""
        if self.corpus is None:
            return None
        reader = self._readers.get(request)
        if reader is None:
            reader = self._readers[request] = CorpusReader(self.corpus)
        reader.read(request.tokens)
        return reader
