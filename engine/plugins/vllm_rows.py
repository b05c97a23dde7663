"""vLLM's requests as the adapter tracks them, with the index that our n-gram looks up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from parlay.engine.plugins.adapter import Adapter, Tracked
from parlay.engine.plugins.tracked import Columns
from parlay.engine.proposers.ngram_index import NgramIndex
from parlay.engine.shadow import SHADOW_TOKENS
from parlay.policies.types import NGRAM, ShadowKind, ShadowRows, no_shadows

SHADOWED = 8
"""Guesses kept at a time: more would teach little more, and take their time."""


@dataclass(slots=True, eq=False)
class Row:
    """One request. source: vLLM's own; index: what our n-gram reads, None where it may not.

    in_flight: steps under way that will give it at least one token each.
    """

    source: Any
    tracked: Tracked
    index: NgramIndex | None
    in_flight: int = 0


@dataclass(slots=True)
class _Guess:
    """What our n-gram would have drafted from place `start` of a text on."""

    row: Row
    start: int
    tokens: list[int]
    match_tokens: int


class Group:
    """Some rows in the order of a view; kept for as long as vLLM runs the same requests.

    place: a request's row. prompt_tokens, max_tokens i32 [rows]. Every list of theirs is read in
    one go, which is what a step costs.
    """

    def __init__(self, names: list[str], rows: list[Row], adapter: Adapter) -> None:
        self.names, self.rows = names, rows
        self.sources = [row.source for row in rows]
        self.columns = Columns([row.tracked for row in rows], adapter.limits)
        self.place = {name: i for i, name in enumerate(names)}
        self.prompt_tokens = np.array([s.num_prompt_tokens for s in self.sources], np.int32)
        self.max_tokens = np.array([s.max_tokens for s in self.sources], np.int32)
        # A session's next turn makes of its answer a prompt.
        self._stays = True not in [getattr(s, "resumable", False) for s in self.sources]

    def __len__(self) -> int:
        return len(self.names)

    def is_of(self, names: list[str], sources: list[Any]) -> bool:
        """Say whether these are the very requests, in this order."""
        # A name may come again with another request.
        return self._stays and names == self.names and all(map(is_, sources, self.sources))


class Rows:
    """Every request that vLLM runs, from its first step to its end.

    with_ngram: index their texts.
    """

    def __init__(self, adapter: Adapter, with_ngram: bool) -> None:
        self.adapter, self.with_ngram = adapter, with_ngram
        self._guesses: dict[int, _Guess] = {}
        self._rows: dict[str, Row] = {}
        self._group: Group | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Say whether no more guesses are kept."""
        return len(self._guesses) >= SHADOWED

    def group(self, names: list[str], sources: list[Any]) -> Group:
        """Return the rows of these requests; takes them on at first sight."""
        group = self._group
        if group is None or not group.is_of(names, sources):
            rows = [self._of(name, source) for name, source in zip(names, sources, strict=True)]
            group = self._group = Group(names, rows, self.adapter)
        return group

    def forget(self, names: Iterable[str]) -> None:
        """Let go of requests that have ended."""
        for name in names:
            row = self._rows.pop(name, None)
            if row is not None:
                self._group = None
                self.adapter.forget(row.tracked)
                self._guesses.pop(row.tracked.request_id, None)

    def read(self, group: Group, tokens: list[int]) -> list[int]:
        """Bring the indexes up to date; return by row how long a match each text ends with.

        tokens: of each text. The match is 0 for a row whose prompt is not read yet.
        """
        match = []
        for row, source, end in zip(group.rows, group.sources, tokens, strict=True):
            index, reading = row.index, source.is_prefill_chunk
            if index is None:
                match.append(0)
                continue
            known = len(index.tokens)
            if end > known:
                # Of a prompt that is read in parts no more than that is indexed, not all in a step.
                stop = source.num_computed_tokens if reading else end
                index.extend(source.all_token_ids[known:stop])
            elif end < known:  # a session that goes on takes tokens back
                row.index = None
                reading = True
            match.append(0 if reading else index.match_tokens)
        return match

    def matches(self, group: Group) -> list[int]:
        """Return what `read` returned last; ones where vLLM's own n-gram drafts: it is silent."""
        if not self.with_ngram:
            return [1] * len(group)
        return [row.index.match_tokens if row.index else 0 for row in group.rows]

    def offer(self, rows: Iterable[Row]) -> None:
        """Keep guesses that nobody drafts, to see what would have come of them."""
        for row in rows:
            if self.full:
                return
            key, index = row.tracked.request_id, row.index
            if index is None or key in self._guesses:
                continue
            guess = index.propose(SHADOW_TOKENS)
            if guess:
                self._guesses[key] = _Guess(row, len(index.tokens), guess, index.match_tokens)

    def score(self) -> ShadowRows:
        """Return the kept guesses whose texts have come as far as they foretold."""
        decided: list[tuple[int, ...]] = []
        for key, guess in list(self._guesses.items()):
            source, offered = guess.row.source, len(guess.tokens)
            known, end = source.num_tokens, guess.start + offered
            if guess.start <= known < end and not source.is_finished():
                continue
            del self._guesses[key]
            seen = source.all_token_ids[guess.start : end] if known > guess.start else []
            if not seen:
                continue
            pairs = enumerate(zip(guess.tokens, seen, strict=False))
            held = next((i for i, (a, b) in pairs if a != b), len(seen))
            decided.append((key, offered, held, min(held + 1, len(seen)), guess.match_tokens))
        return _shadow_rows(decided) if decided else _NO_SHADOWS

    def _of(self, name: str, source: Any) -> Row:
        row = self._rows.get(name)
        if row is None or row.source is not source:
            self.forget([name])
            row = self._rows[name] = self._take_on(source)
        return row

    def _take_on(self, source: Any) -> Row:
        sampling = source.sampling_params
        tracked = self.adapter.add_hinted(sampling.extra_args if sampling else None)
        if sampling is not None:
            tracked.temperature = float(sampling.temperature)
            tracked.seeded = sampling.seed is not None
        indexed = self.with_ngram and source.prompt_token_ids is not None
        return Row(source, tracked, NgramIndex() if indexed else None)


_NO_SHADOWS = no_shadows()


def _shadow_rows(decided: list[tuple[int, ...]]) -> ShadowRows:
    request_id, offered, held, observed, match = zip(*decided, strict=True)
    return ShadowRows(
        request_id=np.array(request_id, np.uint64),
        proposer=np.full(len(decided), NGRAM, np.uint8),
        offered_k=np.array(offered, np.int16),
        matched=np.array(held, np.float32),
        observed=np.array(observed, np.int16),
        match_tokens=np.array(match, np.int32),
        kind=np.full(len(decided), ShadowKind.MATCH, np.uint8),
    )
