"""vLLM's requests as the adapter tracks them, with the text that our n-gram looks up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlay.engine.backend import Lookup
from parlay.engine.plugins.adapter import Adapter, Tracked
from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.request import Request
from parlay.engine.shadow import ShadowScorer
from parlay.policies.types import Array, ShadowRows

SHADOWED = 8
"""Guesses kept in a step: more would teach little more, and take their time."""


@dataclass(slots=True, eq=False)
class Row:
    """One request. source: vLLM's own; text: what our n-gram reads, None where it may not.

    in_flight: steps under way that will give it at least one token each.
    """

    source: Any
    tracked: Tracked
    text: Request | None
    in_flight: int = 0


class Rows:
    """Every request that vLLM runs, from its first step to its end.

    with_ngram: keep their texts. model_tokens: the longest text the model can hold.
    """

    def __init__(self, adapter: Adapter, with_ngram: bool, model_tokens: int) -> None:
        self.adapter, self.model_tokens = adapter, model_tokens
        self.ngram = NgramProposer() if with_ngram else None
        self.shadow = ShadowScorer()
        self._guessed: dict[int, Row] = {}
        self._rows: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, name: str, source: Any) -> Row:
        """Return the row of a request; takes it on at first sight."""
        row = self._rows.get(name)
        if row is None or row.source is not source:
            self.forget([name])
            row = self._rows[name] = self._take_on(source)
        return row

    def forget(self, names: Iterable[str]) -> None:
        """Let go of requests that have ended."""
        for name in names:
            row = self._rows.pop(name, None)
            if row is None:
                continue
            self.adapter.forget(row.tracked)
            if self.ngram is not None and row.text is not None:
                self.ngram.forget(row.text)
                self.shadow.forget(row.text.request_id)
                self._guessed.pop(row.text.request_id, None)

    def describe(self, row: Row, unread: int) -> None:
        """Say where a request stands; unread: tokens of its prompt left for the coming step."""
        source, tracked, coming = row.source, row.tracked, row.in_flight
        context, output = source.num_tokens + coming, source.num_output_tokens + coming
        tracked.context_tokens, tracked.output_tokens = context, output
        tracked.prefill_tokens = unread
        # k drafts emit up to k + 1 tokens.
        tracked.room = max(min(source.max_tokens - output, self.model_tokens - context) - 1, 0)

    def lookup(self, rows: list[Row], depth: int) -> Lookup:
        """Return our n-gram's guesses, none for a row whose prompt is not read yet."""
        found = Lookup(np.zeros(len(rows), np.int32), np.full((len(rows), depth), -1, np.int64))
        places = [i for i, row in enumerate(rows) if self._read(row) is not None]
        if self.ngram is not None and places:
            texts = [text for i in places if (text := rows[i].text) is not None]
            some = self.ngram.lookup(texts, depth)
            found.match_tokens[places], found.tokens[places] = some.match_tokens, some.tokens
        return found

    def offer(self, rows: list[Row], lookup: Lookup, idle: Array) -> None:
        """Keep guesses of some rows where `idle`, bool, to see what would have come of them."""
        places = np.flatnonzero(idle & (lookup.match_tokens > 0)).tolist()[:SHADOWED]
        texts = [text for i in places if (text := rows[i].text) is not None]
        if texts:
            part = Lookup(lookup.match_tokens[places], lookup.tokens[places])
            self.shadow.offer(texts, part, np.ones(len(texts), bool))
            self._guessed.update(
                (text.request_id, rows[i]) for i, text in zip(places, texts, strict=True)
            )

    def score(self) -> ShadowRows:
        """Return the kept guesses that what has been committed decides."""
        for row in self._guessed.values():
            self._read(row)
        texts = [row.text for row in self._guessed.values() if row.text is not None]
        decided = self.shadow.score(texts)
        for request_id in decided.request_id.tolist():
            self._guessed.pop(request_id, None)
        return decided

    def _read(self, row: Row) -> Request | None:
        """Bring a row's text up to date."""
        source, text = row.source, row.text
        if text is None:
            return None
        known = len(text.tokens)
        if source.num_tokens < known:  # a session that goes on takes tokens back
            row.text = None
            return None
        if source.num_tokens > known:
            text.tokens.extend(source.all_token_ids[known:])
        text.computed = min(source.num_computed_tokens, len(text.tokens) - 1)
        return text

    def _take_on(self, source: Any) -> Row:
        sampling = source.sampling_params
        tracked = self.adapter.add_hinted(sampling.extra_args if sampling else None)
        if sampling is not None:
            tracked.temperature = float(sampling.temperature)
            tracked.seeded = sampling.seed is not None
        text = None
        if self.ngram is not None and source.prompt_token_ids is not None:
            tokens = list(source.all_token_ids)
            text = Request(tracked.request_id, tokens, source.num_prompt_tokens)
        else:
            tracked.match_tokens = 1  # vLLM's own n-gram does not say
        return Row(source, tracked, text)
