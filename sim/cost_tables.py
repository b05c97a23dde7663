"""A cost model made of tables: what a step takes, from token curves and attention grids.

A profile is a JSON object (see `parse_profile`); measured tables and rooflines both become one, so
that one evaluator serves all of them. A step is looked up in a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, PROPOSERS, Array

_MOST = 1e15
"""No figure of a profile is larger; keeps arithmetic finite."""


@dataclass(slots=True, frozen=True)
class Work:
    """What one engine step runs.

    tokens: rows of the target's verify pass (decoding, drafts, prefill), before padding; requests
    that decode; kv_tokens read by the verify pass, all requests together; draft_rows: rows of each
    pass of the draft model; draft_kv_tokens: KV tokens of the requests it drafts for; medusa_rows
    and ngram_rows: rows these draft for; catch_up_tokens the draft model reads only to catch up.
    """

    tokens: int
    requests: int
    kv_tokens: int
    draft_rows: tuple[int, ...] = ()
    draft_kv_tokens: int = 0
    medusa_rows: int = 0
    ngram_rows: int = 0
    catch_up_tokens: int = 0


@dataclass(slots=True)
class StepTime:
    """What a step takes: draft_ms f32 [PROPOSERS]; overhead_ms is the host's."""

    verify_ms: float
    draft_ms: Array
    overhead_ms: float
    padded_tokens: int

    @property
    def step_ms(self) -> float:
        """Return the sum: nothing is assumed to overlap."""
        return self.verify_ms + float(self.draft_ms.sum()) + self.overhead_ms


@dataclass(slots=True, frozen=True)
class PassCost:
    """What one pass of a model takes: a curve over its rows, and attention beside it.

    tokens and ms: the curve's points, ascending in tokens. attention_ms [requests, context]: the
    time to read the KV of that many requests of that context, on its two axes. row_context_ms: the
    arithmetic of one row attending to one token; attention takes the longer of the two. All are
    piecewise linear, and go on beyond their last points as they came.
    """

    tokens: list[float]
    ms: list[float]
    requests: list[float]
    context: list[float]
    attention_ms: list[list[float]]
    row_context_ms: float

    def rows_ms(self, rows: float) -> float:
        """Return the time of everything but attention for `rows` rows."""
        x, y = self.tokens, self.ms
        i = min(max(bisect_right(x, rows) - 1, 0), len(x) - 2)
        if rows <= x[0]:
            return y[0]
        return y[i] + (y[i + 1] - y[i]) * (rows - x[i]) / (x[i + 1] - x[i])

    def attend_ms(self, rows: float, requests: float, kv_tokens: float) -> float:
        """Return the time of attention: `requests` share `kv_tokens` evenly, and `rows` attend."""
        requests = max(requests, 1.0)
        context = kv_tokens / requests
        a, b, grid = self.requests, self.context, self.attention_ms
        i = min(max(bisect_right(a, requests) - 1, 0), len(a) - 2)
        j = min(max(bisect_right(b, context) - 1, 0), len(b) - 2)
        u = (requests - a[i]) / (a[i + 1] - a[i])
        v = max((context - b[j]) / (b[j + 1] - b[j]), 0.0)
        low, high = grid[i], grid[i + 1]
        read = (1.0 - u) * (low[j] + v * (low[j + 1] - low[j]))
        read += u * (high[j] + v * (high[j + 1] - high[j]))
        return max(read, rows * (context * self.row_context_ms))


@dataclass(slots=True, frozen=True)
class TableCosts:
    """A cost model from a profile; `time` is pure.

    A step of up to the last bucket edge is padded to the next one, beyond that it runs as it is;
    where it had to be padded, its verify pass takes `off_edge_factor` times as long. A draft pass
    takes `draft_pass_ms` beside its rows. Tokens that the draft model only catches up are read in
    its first pass, or in one of their own where it drafts nothing. Medusa and n-gram: a fixed part
    and one a row. The output layer is charged for every row, prompt and catch-up rows too, which
    makes those up to 7% (8B) or 27% (1B) too dear.
    """

    name: str
    source: str
    bucket_edges: tuple[int, ...]
    off_edge_factor: float
    overhead_ms: float
    target: PassCost
    draft: PassCost
    draft_pass_ms: float
    medusa: tuple[float, float]
    ngram: tuple[float, float]

    def time(self, work: Work) -> StepTime:
        """Return what `work` takes."""
        tokens = padded = work.tokens
        verify_ms = 0.0
        if tokens > 0:
            edges = self.bucket_edges
            if edges and tokens <= edges[-1]:
                padded = edges[bisect_left(edges, tokens)]
            verify_ms = self.target.rows_ms(padded)
            verify_ms += self.target.attend_ms(tokens, work.requests, work.kv_tokens)
            if padded != tokens:
                verify_ms *= self.off_edge_factor
        draft_ms = np.zeros(PROPOSERS, np.float32)
        if work.draft_rows or work.catch_up_tokens:
            draft_ms[DRAFT_MODEL] = self._draft_ms(work)
        if work.medusa_rows:
            draft_ms[MEDUSA] = self.medusa[0] + self.medusa[1] * work.medusa_rows
        if work.ngram_rows:
            draft_ms[NGRAM] = self.ngram[0] + self.ngram[1] * work.ngram_rows
        return StepTime(verify_ms, draft_ms, self.overhead_ms, padded)

    def _draft_ms(self, work: Work) -> float:
        draft, total, last, last_ms = self.draft, 0.0, -1, 0.0
        first, behind = max(work.draft_rows, default=0), work.catch_up_tokens
        kv_of_row = work.draft_kv_tokens / max(first, 1)
        for rows in work.draft_rows or (0,):
            if rows + behind and (behind or rows != last):
                last_ms = self.draft_pass_ms + draft.rows_ms(rows + behind)
                last_ms += draft.attend_ms(rows + behind, rows, max(rows, 1) * kv_of_row)
            total += last_ms if rows + behind else 0.0
            last, behind = (-1, 0) if behind else (rows, 0)
        return total


def parse_profile(name: str, profile: object) -> TableCosts:
    """Return the cost model of a profile, a JSON object.

    Keys: source; bucket_edges (ascending token counts, [] for any) and off_edge_factor; overhead_ms
    a step; target and draft, each {tokens, ms, attention: {requests, context_tokens, ms},
    row_context_ms}; draft_pass_ms; medusa and ngram, each {fixed_ms, row_ms}. Raises ValueError
    naming the field that is missing, not a number, negative or out of order.
    """
    top = _object(name, profile)
    edges = _numbers(f"{name}.bucket_edges", _get(name, top, "bucket_edges"), 0, 1.0)
    if any(edge != int(edge) for edge in edges):
        raise ValueError(f"{name}.bucket_edges must be whole token counts")
    return TableCosts(
        name=name,
        source=str(_get(name, top, "source")),
        bucket_edges=tuple(int(edge) for edge in edges),
        off_edge_factor=_number(name, top, "off_edge_factor", 1.0),
        overhead_ms=_number(name, top, "overhead_ms"),
        target=_parse_pass(f"{name}.target", _get(name, top, "target")),
        draft=_parse_pass(f"{name}.draft", _get(name, top, "draft")),
        draft_pass_ms=_number(name, top, "draft_pass_ms"),
        medusa=_parse_rows(f"{name}.medusa", _get(name, top, "medusa")),
        ngram=_parse_rows(f"{name}.ngram", _get(name, top, "ngram")),
    )


def _parse_pass(where: str, given: object) -> PassCost:
    fields = _object(where, given)
    tokens = _numbers(f"{where}.tokens", _get(where, fields, "tokens"), 2, 1.0)
    ms = _times(f"{where}.ms", _get(where, fields, "ms"), len(tokens))
    if min(ms) <= 0.0 or ms[-1] < ms[-2]:
        raise ValueError(f"{where}.ms must be above 0 and not fall at its end")
    where = f"{where}.attention"
    grid = _object(where, _get(where, fields, "attention"))
    requests = _numbers(f"{where}.requests", _get(where, grid, "requests"), 2, 0.0)
    context = _numbers(f"{where}.context_tokens", _get(where, grid, "context_tokens"), 2, 0.0)
    rows = _get(where, grid, "ms")
    if not isinstance(rows, Sequence) or len(rows) != len(requests):
        raise ValueError(f"{where}.ms needs one row for each of the {len(requests)} requests")
    table = [_times(f"{where}.ms", row, len(context)) for row in rows]
    return PassCost(tokens, ms, requests, context, table, _number(where, fields, "row_context_ms"))


def _parse_rows(where: str, given: object) -> tuple[float, float]:
    fields = _object(where, given)
    return _number(where, fields, "fixed_ms"), _number(where, fields, "row_ms")


def _object(where: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a JSON object, not {type(given).__name__}")
    return given


def _get(where: str, fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise ValueError(f"{where} has no '{key}'; see parse_profile for what a profile holds")
    return fields[key]


def _number(where: str, fields: Mapping[str, Any], key: str, least: float = 0.0) -> float:
    value = _get(where, fields, key)
    if not _is_number(value) or not least <= value <= _MOST:
        raise ValueError(f"{where}.{key} must be a number of at least {least:g}, not {value!r}")
    return float(value)


def _numbers(where: str, given: object, count: int, least: float) -> list[float]:
    """Return an ascending axis of at least `count` numbers from `least` up."""
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) < count:
        raise ValueError(f"{where} must be a list of at least {count} numbers")
    for value in given:
        if not _is_number(value) or not least <= value <= _MOST:
            raise ValueError(f"{where} must hold numbers of at least {least:g}, not {value!r}")
    if any(b <= a for a, b in pairwise(given)):
        raise ValueError(f"{where} must ascend")
    return [float(value) for value in given]


def _times(where: str, given: object, count: int) -> list[float]:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        raise ValueError(f"{where} must be a list of {count} times, one for each point of its axis")
    for value in given:
        if not _is_number(value) or not 0.0 <= value <= _MOST:
            raise ValueError(f"{where} must hold times of at least 0 ms, not {value!r}")
    return [float(value) for value in given]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
