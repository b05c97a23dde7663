"""A model with its paged cache: what reads tokens, for target and draft alike.

Two implementations of `Model`: `models.Llama` on torch, anywhere in any dtype, and
`kernels.native.NativeLlama`, bfloat16 on one CPU thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from parlay.engine.graph_capture import Capture
from parlay.engine.graphs import Graphs, StaticAttention, edges_up_to
from parlay.engine.kernels import native
from parlay.engine.kernels.flight import NativeFlight
from parlay.engine.landed import Landed
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.sampling import first_choices
from parlay.engine.spans import Spans
from parlay.engine.transfer import upload
from parlay.policies.types import Array


class Model(Protocol):
    """A Llama's weights, laid out for decoding."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor

    def new_cache(self, blocks: int, block_tokens: int) -> Any:
        """Return an empty paged cache, which only this model understands."""
        ...

    def embed(self, ids: Tensor, states: Tensor | None = None) -> Tensor:
        """Return the input [tokens, hidden] of ids i64 [tokens]; states [tokens, width] are what a
        draft with `state_layers` reads besides.
        """  # noqa: D205
        ...

    def run(
        self, x: Tensor, cache: Any, spans: Spans, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Append x's keys and values and attend; return the states that the head reads, normed,
        [tokens, hidden], and those behind the layers `taps` side by side [tokens, taps * hidden].

        Below the last layer those are normed without weight, behind it they are the first.
        """  # noqa: D205
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, head rows] logits of normed states."""
        ...


def load_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    embedding: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    block_tokens: int,
    invariant: bool = False,
) -> Model:
    """Lay weights out for the kernels where they fit model and machine, else for torch.

    invariant: a token must have the same bits in every batch. With the kernels it has.
    """
    if block_tokens == native.BLOCK_TOKENS and native.fits(config, dtype, device):
        return native.NativeLlama(config, weights, embedding)
    return Llama(config, weights, embedding, dtype, device, invariant)


@dataclass(slots=True)
class Flight:
    """A pass on its way over `spans`, or what it gave."""

    spans: Spans
    made: Landed | NativeFlight


After = Callable[[Tensor], tuple[Tensor, ...]]


def chosen(logits: Tensor) -> tuple[Tensor, ...]:
    """Return what a target's graph makes of logits: i64 [n], the first of each row's largest."""
    return (first_choices(logits),)


class Runner:
    """Reads tokens into a model's cache, and keeps the states behind the layers `taps`.

    Kept states lie where the tokens' keys do: whoever owns the block owns them. graphs: what
    replays small passes, where there is any; after: what is made of logits besides.
    """

    def __init__(
        self,
        model: Model,
        blocks: int,
        block_tokens: int,
        taps: Sequence[int] = (),
        after: After = chosen,
    ) -> None:
        self.model, self.block_tokens, self.taps = model, block_tokens, tuple(taps)
        self.after = after
        self.cache = model.new_cache(blocks, block_tokens)
        width = len(self.taps) * model.config.hidden
        # The last row is nobody's: graphs write their padding there.
        self._kept = torch.zeros(
            blocks * block_tokens + 1, width, dtype=model.dtype, device=model.device
        )
        self.graphs: Graphs | None = None

    def use_graphs(self, most_tokens: int, positions: int, capture: Capture) -> bool:
        """Replay passes of up to `most_tokens` from now on; False: this model has no graphs.

        positions: where in its cache the longest row can end.
        """
        if not (isinstance(self.model, Llama) and isinstance(self.cache, StaticAttention)):
            return False
        blocks, edges = -(-positions // self.block_tokens), edges_up_to(most_tokens)
        self.graphs = Graphs(
            self.model, self.cache, self._kept, self.taps, blocks, edges, capture, self.after
        )
        return True

    def read(
        self, fed: Sequence[Sequence[int]], spans: Spans, states: Tensor | None = None
    ) -> Tensor:
        """Compute the rows' tokens; return their normed states [tokens, hidden]."""
        return self._run(self._on_device(flat(fed)), spans, states)

    def forward(
        self,
        ids: Array | Tensor,
        spans: Spans,
        states: Tensor | None = None,
        places: Array | None = None,
    ) -> Landed:
        """Compute tokens ids i64 [tokens], flat; say what follows those of `places` i64 [n].

        places None: all of them. On a GPU all is queued on return, as a graph's replay where there
        is one of the size: then what is returned holds until the next one.
        """
        made = None if self.graphs is None else self.graphs.run(ids, spans, states)
        if made is not None:
            said = [made.logits, *made.after]
            if places is None or len(places) == len(ids):
                said = [part[: len(ids)] for part in said]
            else:
                at = self._on_device(places)
                said = [part[at] for part in said]
            return Landed(made.hidden, made.hidden[:0], said[0], 0.0, tuple(said[1:]))
        hidden = self._run(self._on_device(ids), spans, states)
        read = hidden
        if places is not None and len(places) < len(hidden):
            read = hidden[self._on_device(places)]
        logits = self.model.logits(read) if len(read) else read
        return Landed(hidden, hidden[:0], logits, 0.0)

    def _run(self, ids: Tensor, spans: Spans, states: Tensor | None = None) -> Tensor:
        model = self.model
        hidden, tapped = model.run(model.embed(ids, states), self.cache, spans, self.taps)
        if self.taps:
            self._kept[self._slots(spans)] = tapped
        return hidden

    def _on_device(self, values: Array | Tensor) -> Tensor:
        return values if isinstance(values, Tensor) else upload(self.model.device, values)[0]

    def launch(self, ids: Array | Tensor, spans: Spans, places: Array, beside: bool) -> Flight:
        """Begin to read tokens ids i64 [tokens], and to make the logits of those at `places`.

        beside: what can go on while Python does other things does; nobody else may run the model
        until it has landed. Else all is done on return, or queued on the device.
        """
        model = self.model
        if beside and isinstance(model, native.NativeLlama):
            x = model.embed(self._on_device(ids))
            return Flight(spans, model.launch(x, self.cache, spans, self.taps, places))
        return Flight(spans, self.forward(ids, spans, places=places))

    def land(self, flight: Flight) -> Landed:
        """Wait for what was launched, and keep its states."""
        made = flight.made
        if isinstance(made, Landed):
            return made
        landed = made.land()
        if self.taps:
            self._kept[self._slots(flight.spans)] = landed.tapped
        return landed

    def move(self, from_slots: Array, to_slots: Array) -> None:
        """Copy what is kept of tokens in slots i64 [n] to others; all are read before a write."""
        if len(from_slots):
            source, target = upload(self.model.device, from_slots, to_slots)
            self.cache.move(source, target)
            if self.taps:
                self._kept[target] = self._kept[source]

    def states_before(
        self, spans: Spans, known: Sequence[int], layers: Sequence[int] | None = None
    ) -> Tensor:
        """Return for each position the kept states of the one before, [tokens, layers * hidden].

        known: how many positions of each row have been computed; nothing is known beyond, nor
        before the first: zeros. layers: some of the taps, None: all.
        """
        size, slots, missing = self.block_tokens, list[int](), list[int]()
        rows = zip(spans.tables, spans.starts, spans.lengths, known, strict=True)
        for table, start, length, end in rows:
            for at in range(start - 1, start - 1 + length):
                if not 0 <= at < end:
                    missing.append(len(slots))
                slots.append(table[at // size] * size + at % size)
        found = self._kept[self._on_device(np.asarray(slots, np.int64))]
        if missing:
            found.index_fill_(0, self._on_device(np.asarray(missing, np.int64)), 0.0)
        if layers is None or tuple(layers) == self.taps:
            return found
        parts = found.split(self.model.config.hidden, 1)
        return torch.cat([parts[self.taps.index(layer)] for layer in layers], 1)

    def _slots(self, spans: Spans) -> Tensor:
        return self._on_device(spans.slots(self.block_tokens))


def flat(fed: Sequence[Sequence[int]]) -> Array:
    """Return the rows' tokens behind each other, i64 [tokens]."""
    return np.asarray([t for row in fed for t in row], np.int64)
