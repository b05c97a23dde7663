"""Passes of a model as graphs, one for each size: launching its kernels one by one costs more host
time than a small pass takes on a GPU.

A pass is padded to a bucket of tokens. What a bucket's graph reads, token ids, states, the
attention's block tables and masks, lies in buffers that stay: a step writes them and replays.
Padding reads and writes no cache, and nothing looks at what it yields.
"""  # noqa: D205

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from parlay.engine.attention.paged import Attention, PagedKV
from parlay.engine.graph_capture import Capture, Recording
from parlay.engine.models import Llama
from parlay.engine.spans import Spans
from parlay.engine.transfer import send_into
from parlay.policies.types import K_LIMIT, Array

EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a pass for which there are graphs."""
WIDEST_ROW = K_LIMIT + 1
"""A row with more tokens is a prompt, which keeps a GPU busy without a graph."""
TOKENS_A_ROW = (8, 4, 1)
"""A graph of n tokens is cut for n / 8 rows, n / 4 or n: a row's text is read once for more tokens
where rows are wide. A step takes the first in which its rows find room."""


def edges_up_to(tokens: int) -> tuple[int, ...]:
    """Return the edges that steps of up to `tokens` tokens need, at least one."""
    return EDGES[: bisect_left(EDGES, tokens) + 1]


@runtime_checkable
class StaticAttention(Attention, Protocol):
    """An `Attention` whose passes can be laid out for a size, then filled with any step that fits.

    A pass has slots i64 [tokens], -1 for a token that is not there, which reads and writes nothing.
    """

    cache: PagedKV

    def static(self, tokens: int, rows: int, blocks: int) -> Any:
        """Return an empty pass for so many tokens, rows, and blocks of a row."""
        ...

    def fill(self, into: Any, spans: Spans, window: int | None = None) -> None:
        """Write a step into a pass, without waiting for the device."""
        ...


@dataclass(slots=True)
class GraphStats:
    """What graphs did: passes recorded, replayed, and run without one, by reason; padding_tokens:
    tokens that replays had beside the steps' own.
    """  # noqa: D205

    recorded: int = 0
    replayed: int = 0
    padding_tokens: int = 0
    eager: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Replayed:
    """What a replay left, valid until the next one: [bucket] each, the step's tokens first."""

    hidden: Tensor
    logits: Tensor
    after: tuple[Tensor, ...]


@dataclass(slots=True)
class _Graph:
    """A recording with the passes that it runs over, one for each of the model's reaches."""

    passes: list[Any]
    recording: Recording


class Graphs:
    """A model's passes over its cache, recorded when a size is first met.

    kept [slots + 1, width]: takes the states behind the layers `taps` by slot; its last row is
    nobody's. blocks: of the longest row. edges: tokens of a pass, ascending. after: what is made of
    a bucket's logits within its graph.
    """

    def __init__(
        self,
        model: Llama,
        cache: StaticAttention,
        kept: Tensor,
        taps: Sequence[int],
        blocks: int,
        edges: Sequence[int],
        capture: Capture,
        after: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> None:
        self.model, self.cache, self.kept, self.taps = model, cache, kept, tuple(taps)
        self.blocks, self.edges, self.capture, self.after = blocks, tuple(edges), capture, after
        self.stats = GraphStats()
        most, device = self.edges[-1], model.device
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        width = len(model.config.state_layers) * model.config.hidden
        self._states = torch.zeros(most, width, dtype=model.dtype, device=device) if width else None
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def run(
        self, ids: Tensor | Array, spans: Spans, states: Tensor | None = None
    ) -> Replayed | None:
        """Replay the graph of a pass of tokens ids i64 [tokens]; None: it has to be run without.

        states [tokens, width]: what a model with state_layers reads besides; None: nothing.
        """
        tokens, rows = len(ids), len(spans.lengths)
        reason = self._unfit(tokens, spans)
        if reason is not None:
            self.stats.eager[reason] += 1
            return None
        edge = self.edges[bisect_left(self.edges, tokens)]
        room = next(r for n in TOKENS_A_ROW if (r := -(-edge // n)) >= rows)
        key = edge, room
        if key not in self._graphs:
            self._graphs[key] = self._record(edge, room)
            self.stats.recorded += 1
        graph = self._graphs[key]
        send_into(self._ids[:tokens], ids)
        if self._states is not None:
            into = self._states[:tokens]
            into.zero_() if states is None else into.copy_(states)
        for reach, one_pass in zip(self.model.reaches, graph.passes, strict=True):
            self.cache.fill(one_pass, spans, reach.window)
        graph.recording.replay()
        self.stats.replayed += 1
        self.stats.padding_tokens += edge - tokens
        hidden, logits, *after = graph.recording.results
        return Replayed(hidden, logits, tuple(after))

    def _unfit(self, tokens: int, spans: Spans) -> str | None:
        """Return why a pass has no graph; None: it has one."""
        if max(spans.lengths) > WIDEST_ROW:
            return "prompt"
        if tokens > self.edges[-1]:
            return "tokens"
        last = max(s + n for s, n in zip(spans.starts, spans.lengths, strict=True))
        return "context" if last > self.blocks * self.cache.cache.block_tokens else None

    def _record(self, tokens: int, rows: int) -> _Graph:
        """Record a size over passes that are empty yet: whatever runs meanwhile touches nothing."""
        passes = [self.cache.static(tokens, rows, self.blocks) for _ in self.model.reaches]
        ids, states = self._ids[:tokens], self._states
        nobody = len(self.kept) - 1

        def work() -> tuple[Tensor, ...]:
            x = self.model.embed(ids, None if states is None else states[:tokens])
            hidden, tapped = self.model.run_over(x, self.cache, passes, self.taps)
            if self.taps:
                slots = passes[0].slots
                self.kept.index_copy_(0, slots.masked_fill(slots < 0, nobody), tapped)
            logits = self.model.logits(hidden)
            return hidden, logits, *self.after(logits)

        return _Graph(passes, self.capture.record(work))
