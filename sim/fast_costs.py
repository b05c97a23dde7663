"""The cost models of `costs.py` for many batches at once: dense tables instead of a search a step.

Each batch names one of the models by index. Scales, [batches], change a machine a little: how much
dearer its verified tokens are, its draft model, its Medusa heads; at 1 every time is the model's
own to the last digit, for sums and products are made in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.policies.cost import padded
from parlay.policies.types import Array
from parlay.sim.cost_tables import PassCost, TableCosts


@dataclass(slots=True)
class Scales:
    """What multiplies each batch's costs: verified tokens beyond the first, draft passes, heads."""

    verify: Array
    draft: Array
    medusa: Array

    @classmethod
    def ones(cls, batches: int) -> Scales:
        """Return scales that change nothing."""
        return cls(np.ones(batches), np.ones(batches), np.ones(batches))


@dataclass(slots=True)
class Attention:
    """What attention takes in a pass: reading the KV, or the rows' arithmetic if that is longer."""

    read_ms: Array
    row_ms: Array

    def ms(self, rows: Array, at: Array | slice = slice(None)) -> Array:
        """Return the time of `rows`, of the element `at`."""
        took: Array = np.maximum(self.read_ms[at], rows * self.row_ms[at])
        return took


class _Passes:
    """`PassCost` of several models: rows_ms as a table [models, tokens], attention as grids."""

    def __init__(self, costs: Sequence[PassCost], most: int) -> None:
        self.table = np.array([[c.rows_ms(t) for t in range(most + 1)] for c in costs])
        self.costs = list(costs)

    def rows_ms(self, model: Array, rows: Array) -> Array:
        """Return `PassCost.rows_ms` of rows i64."""
        most = self.table.shape[1] - 1
        ms: Array = self.table[model, np.minimum(rows, most)]
        beyond = rows > most
        if beyond.any():
            model = np.broadcast_to(model, np.shape(rows))
            for index, cost in enumerate(self.costs):
                mine = beyond & (model == index)
                ms[mine] = _rows_ms(cost, rows[mine])
        return ms

    def attention(self, model: Array, requests: Array, kv_tokens: Array) -> Attention:
        """Return what attention takes, as `PassCost.attend_ms` has it; all of one shape."""
        model = np.broadcast_to(model, np.shape(requests))
        kv_tokens = np.broadcast_to(kv_tokens, np.shape(requests))
        requests = np.maximum(requests, 1.0)
        out = Attention(np.empty(np.shape(requests)), np.empty(np.shape(requests)))
        for index, cost in enumerate(self.costs):
            mine = model == index
            if mine.any():
                context = kv_tokens[mine] / requests[mine]
                out.read_ms[mine] = _read_ms(cost, requests[mine], context)
                out.row_ms[mine] = context * cost.row_context_ms
        return out


def _rows_ms(cost: PassCost, rows: Array) -> Array:
    x, y = np.array(cost.tokens), np.array(cost.ms)
    i = np.clip(np.searchsorted(x, rows, side="right") - 1, 0, len(x) - 2)
    ms: Array = y[i] + (y[i + 1] - y[i]) * (rows - x[i]) / (x[i + 1] - x[i])
    return ms


def _read_ms(cost: PassCost, requests: Array, context: Array) -> Array:
    a, b, grid = np.array(cost.requests), np.array(cost.context), np.array(cost.attention_ms)
    i = np.clip(np.searchsorted(a, requests, side="right") - 1, 0, len(a) - 2)
    j = np.clip(np.searchsorted(b, context, side="right") - 1, 0, len(b) - 2)
    u = (requests - a[i]) / (a[i + 1] - a[i])
    v = np.maximum((context - b[j]) / (b[j + 1] - b[j]), 0.0)
    low, high = grid[i, j], grid[i + 1, j]
    read: Array = (1.0 - u) * (low + v * (grid[i, j + 1] - low))
    read += u * (high + v * (grid[i + 1, j + 1] - high))
    return read


class FastCosts:
    """Step times of many batches; `batch` says which each element of the other arrays is of.

    most_tokens: of a step, drafts and prompts included; most_rows: of a draft pass, more take
    longer to look up.
    """

    def __init__(
        self, models: Sequence[TableCosts], model: Array, most_tokens: int, most_rows: int
    ) -> None:
        self.model = np.asarray(model, np.intp)
        self.scales = Scales.ones(len(self.model))
        self._target = _Passes([m.target for m in models], most_tokens)
        self._draft = _Passes([m.draft for m in models], most_rows)
        self._padded = np.array([_padding(m, most_tokens) for m in models])
        self._off_edge = np.array([m.off_edge_factor for m in models])
        self.overhead_ms = np.array([m.overhead_ms for m in models])[self.model]
        self._pass_ms = np.array([m.draft_pass_ms for m in models])
        self._medusa = np.array([m.medusa for m in models])[self.model].T
        self._ngram = np.array([m.ngram for m in models])[self.model].T

    def padded(self, batch: Array, tokens: Array) -> Array:
        """Return the tokens that a step of `tokens` i64 really runs."""
        return self._padded[self.model[batch], tokens]

    def attention(self, batch: Array, requests: Array, kv_tokens: Array) -> Attention:
        """Return what attention takes in the verify pass."""
        return self._target.attention(self.model[batch], requests, kv_tokens)

    def verify_ms(self, batch: Array, tokens: Array, attention: Attention) -> Array:
        """Return the time of a verify pass, as `TableCosts.time` has it; 0 for no tokens.

        attention has one element a batch.
        """
        model = self.model[batch]
        ms = self._target.table[model, self._padded[model, tokens]]
        first = self._target.table[model, 1]
        took = ms + (self.scales.verify[batch] - 1.0) * (ms - first)
        took = took + attention.ms(tokens, batch)
        off_edge = self._padded[model, tokens] != tokens
        took = took * np.where(off_edge, self._off_edge[model], 1.0)
        return np.where(tokens > 0, took, 0.0)

    def draft_pass_ms(
        self, batch: Array, rows: Array, kv_of_row: Array, behind: Array | int = 0
    ) -> Array:
        """Return the time of one pass of the draft model over `rows` i64; 0 for none."""
        run = rows + behind
        model = self.model[batch]
        took = self._pass_ms[model] + self._draft.rows_ms(model, run)
        kv = np.maximum(rows, 1) * kv_of_row
        took = took + self._draft.attention(model, rows, kv).ms(run)
        return np.where(run > 0, self.scales.draft[batch] * took, 0.0)

    def medusa_ms(self, batch: Array, rows: Array) -> Array:
        """Return the time of Medusa's heads for `rows`; 0 for none."""
        fixed, row_ms = self._medusa[:, batch]
        return np.where(rows > 0, self.scales.medusa[batch] * (fixed + row_ms * rows), 0.0)

    def ngram_ms(self, batch: Array, rows: Array) -> Array:
        """Return the time of looking up n-grams for `rows`; 0 for none."""
        fixed, row_ms = self._ngram[:, batch]
        return np.where(rows > 0, fixed + row_ms * rows, 0.0)


def _padding(model: TableCosts, most: int) -> Array:
    tokens = np.arange(most + 1)
    return np.where(tokens > 0, padded(tokens, np.asarray(model.bucket_edges, np.int64)), 0)
