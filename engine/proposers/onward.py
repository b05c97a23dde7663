"""Reads one more token of each row a pass: what drafting is behind a draft model's first pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from parlay.engine.kernels.native import NativeLlama
from parlay.engine.kernels.onward import NativeOnward
from parlay.engine.runner import Runner
from parlay.engine.spans import Spans
from parlay.policies.types import Array


class Onward(Protocol):
    """Rows of a runner's cache that go on, each with tables and places of its own."""

    def read(self, rows: Array, tokens: Array, step: int) -> Tensor:
        """Read the step-th token, from 0, of rows i64; return logits [rows, head rows]."""
        ...


def onward(
    runner: Runner, tables: Sequence[Sequence[int]], places: Sequence[int], passes: int
) -> Onward:
    """Return what reads up to `passes` tokens of each row from its place in the cache on."""
    if isinstance(runner.model, NativeLlama):
        return NativeOnward(runner.model, runner.cache, tables, places, passes)
    return _Plain(runner, tables, places)


class _Plain:
    def __init__(
        self, runner: Runner, tables: Sequence[Sequence[int]], places: Sequence[int]
    ) -> None:
        self._runner, self._tables, self._places = runner, tables, places

    def read(self, rows: Array, tokens: Array, step: int) -> Tensor:
        at = rows.tolist()
        spans = Spans(
            [self._tables[r] for r in at], [self._places[r] + step for r in at], [1] * len(at)
        )
        hidden = self._runner.read([[t] for t in tokens.tolist()], spans)
        return self._runner.model.logits(hidden)
