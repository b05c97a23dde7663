"""Medusa heads as graphs, one for each place and number of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.engine.graph_capture import Capture, Recording
from parlay.engine.graphs import GraphStats
from parlay.engine.medusa_heads import Heads
from parlay.engine.proposers.confidence import choice_and_peak


@dataclass(slots=True)
class _Step:
    """A recorded step with the buffers that it reads: x [edge, width] and tokens i64 [edge]."""

    x: Tensor
    tokens: Tensor
    recording: Recording


class HeadGraphs:
    """Steps of heads, recorded when a place is first met with so many rows.

    edges: numbers of rows, ascending.
    """

    def __init__(self, heads: Heads, edges: Sequence[int], capture: Capture) -> None:
        self.heads, self.edges, self.capture = heads, tuple(edges), capture
        self.stats = GraphStats()
        self._steps: dict[tuple[int, int], _Step] = {}

    def run(self, place: int, x: Tensor, tokens: Tensor) -> list[Tensor] | None:
        """Return what `Heads.step` does, then `choice_and_peak` of its logits; None: too many rows.

        All of it holds until the next replay but one: the next one may read this one's x.
        """
        rows = len(tokens)
        if rows > self.edges[-1]:
            self.stats.eager["rows"] += 1
            return None
        edge = self.edges[bisect_left(self.edges, rows)]
        if (place, edge) not in self._steps:
            self._steps[place, edge] = self._record(place, edge, x)
            self.stats.recorded += 1
        step = self._steps[place, edge]
        step.x[:rows].copy_(x)
        step.tokens[:rows].copy_(tokens)
        step.recording.replay()
        self.stats.replayed += 1
        self.stats.padding_tokens += edge - rows
        return [part[:rows] for part in step.recording.results]

    def _record(self, place: int, edge: int, like: Tensor) -> _Step:
        x = like.new_zeros(edge, like.shape[1])
        tokens = torch.zeros(edge, dtype=torch.int64, device=like.device)

        def work() -> tuple[Tensor, ...]:
            after, logits = self.heads.step(place, x, tokens)
            return after, logits, *choice_and_peak(logits)

        return _Step(x, tokens, self.capture.record(work))
