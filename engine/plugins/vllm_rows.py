"""vLLM's requests as the adapter tracks them, with the index that our n-gram looks up."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from parlay.engine.kernels.ngram import AnyIndex, Indexes, new_index
from parlay.engine.plugins.adapter import Adapter, Tracked
from parlay.engine.plugins.followed import Order, bucket_of
from parlay.engine.plugins.tracked import Columns
from parlay.engine.shadow import SHADOW_TOKENS
from parlay.policies.types import NGRAM, NONE, Array, ShadowKind, ShadowRows, no_shadows

SHADOWED = 8
"""Guesses kept at a time: more would teach little more, and take their time."""


@dataclass(slots=True, eq=False)
class Row:
    """One request. source: vLLM's own; index: what our n-gram reads, None where it may not.

    known: tokens read by then; mask, most_k: who may draft how much; last: not beyond so many
    tokens.
    in_flight: steps under way that will give it at least one token each.
    """

    source: Any
    tracked: Tracked
    index: AnyIndex | None
    mask: int
    most_k: int
    last: int
    known: int = 0
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

    place: a request's row. What steps without a view need is at hand, the rest made when asked
    for: in a large batch hardly two steps are of the same requests.
    """

    def __init__(self, names: list[str], rows: list[Row], adapter: Adapter) -> None:
        self.names, self.rows, self._limits = names, rows, adapter.limits
        self.sources = [row.source for row in rows]
        self.place = dict(zip(names, range(len(names)), strict=True))
        self._order: Order | None = None
        self._ordered: list[tuple[list[int], list[int]]] = []
        # A session's next turn makes of its answer a prompt.
        self.stays = True not in [getattr(s, "resumable", False) for s in self.sources]
        if not self.stays:
            self.prompt_tokens, self.max_tokens  # noqa: B018 (as they are now)

    @functools.cached_property
    def columns(self) -> Columns:
        """What stays the same of its views."""
        return Columns([row.tracked for row in self.rows], self._limits)

    @functools.cached_property
    def prompt_tokens(self) -> Array:
        """Of each row, i32 [rows]."""
        return np.array([s.num_prompt_tokens for s in self.sources], np.int32)

    @functools.cached_property
    def max_tokens(self) -> Array:
        """Of each row's answer, i32 [rows]."""
        return np.array([s.max_tokens for s in self.sources], np.int32)

    @functools.cached_property
    def indexes(self) -> Indexes:
        """The indexes of the rows that have one."""
        return Indexes([row.index for row in self.rows if row.index is not None])

    def by_order(
        self, order: Order, context: list[int], match: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return each row's proposer and k under a plan that serves again."""
        if order is not self._order:
            ids = [row.tracked.request_id for row in self.rows]
            self._order, self._ordered = order, order.rows(ids)
        by, ks = [], []
        for row, (proposers, lengths), tokens, found in zip(
            self.rows, self._ordered, context, match, strict=True
        ):
            bucket = bucket_of(found)
            k = min(lengths[bucket], row.last - tokens, row.most_k)
            if k > 0 and row.mask >> proposers[bucket] & 1:
                by.append(proposers[bucket])
                ks.append(k)
            else:
                by.append(NONE)
                ks.append(0)
        return by, ks

    def __len__(self) -> int:
        return len(self.names)

    def is_of(self, names: list[str], sources: list[Any]) -> bool:
        """Say whether these are the very requests, in this order."""
        # A name may come again with another request.
        return self.stays and names == self.names and all(map(is_, sources, self.sources))


class Rows:
    """Every request that vLLM runs, from its first step to its end.

    with_ngram: index their texts. most_tokens: in a text, prompt and answer.
    """

    def __init__(self, adapter: Adapter, with_ngram: bool, most_tokens: int) -> None:
        self.adapter, self.with_ngram, self.most_tokens = adapter, with_ngram, most_tokens
        self._decided: list[tuple[int, ...]] = []
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
                key = row.tracked.request_id
                if (guess := self._guesses.pop(key, None)) is not None:
                    self._score(key, guess)

    def read(self, group: Group, tokens: list[int], prompts: bool) -> list[int]:
        """Bring the indexes up to date; return by row how long a match each text ends with.

        tokens: of each text. prompts: some are of prompts not read yet, whose match is 0.
        """
        if not group.stays:
            for row, end in zip(group.rows, tokens, strict=True):
                if end < row.known:  # a session that goes on takes tokens back
                    row.index = None
        more = []
        for row, end in zip(group.rows, tokens, strict=True):
            if row.index is None:
                continue
            source, known = row.source, row.known
            if prompts and source.is_prefill_chunk:
                # Of a prompt that is read in parts no more than that is indexed, not all in a step.
                end = source.num_computed_tokens
            more.append(source.all_token_ids[known:end])
            row.known = max(known, end)
        match = group.indexes.extend(more)
        if len(match) == len(group) and not prompts:
            return match
        return self._matches(group, prompts)

    def matches(self, group: Group) -> list[int]:
        """Return what `read` returned last; ones where vLLM's own n-gram drafts: it is silent."""
        if not self.with_ngram:
            return [1] * len(group)
        return self._matches(group, prompts=False)

    def _matches(self, group: Group, prompts: bool) -> list[int]:
        return [
            0 if index is None or (prompts and row.source.is_prefill_chunk) else index.match_tokens
            for row in group.rows
            for index in (row.index,)
        ]

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
                self._guesses[key] = _Guess(row, row.known, guess, index.match_tokens)

    def score(self) -> None:
        """See which of the kept guesses are decided: their texts have come as far as they told."""
        for key, guess in list(self._guesses.items()):
            source = guess.row.source
            known, end = source.num_tokens, guess.start + len(guess.tokens)
            if guess.start <= known < end and not source.is_finished():
                continue
            del self._guesses[key]
            self._score(key, guess)

    def scored(self) -> ShadowRows:
        """Return what was decided since the last call."""
        if not self._decided:
            return _NO_SHADOWS
        decided, self._decided = self._decided, []
        return _shadow_rows(decided)

    def _score(self, key: int, guess: _Guess) -> None:
        tokens, offered = guess.row.source.all_token_ids, len(guess.tokens)
        seen = tokens[guess.start : guess.start + offered]
        if not seen:
            return
        pairs = enumerate(zip(guess.tokens, seen, strict=False))
        held = next((i for i, (a, b) in pairs if a != b), len(seen))
        told = (key, offered, held, min(held + 1, len(seen)), guess.match_tokens)
        self._decided.append(told)

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
        asked, last = tracked.speculation, source.num_prompt_tokens + source.max_tokens
        return Row(
            source=source,
            tracked=tracked,
            index=new_index() if indexed else None,
            mask=asked.proposer_mask & self.adapter.limits.proposer_mask,
            most_k=min(asked.max_k, self.adapter.limits.k_max),
            # k drafts give up to k + 1 tokens.
            last=min(last, self.most_tokens) - 1,
        )


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
