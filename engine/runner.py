"""A model with its paged cache: what reads tokens, for target and draft alike.

Two implementations of `Model`: `models.Llama` on torch, anywhere in any dtype, and
`kernels.native.NativeLlama`, bfloat16 on one CPU thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from parlay.engine.kernels import native
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.spans import Spans
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


class Runner:
    """Reads tokens into a model's cache, and keeps the states behind the layers `taps`.

    Kept states lie where the tokens' keys do: whoever owns the block owns them.
    """

    def __init__(
        self, model: Model, blocks: int, block_tokens: int, taps: Sequence[int] = ()
    ) -> None:
        self.model, self.block_tokens, self.taps = model, block_tokens, tuple(taps)
        self.cache = model.new_cache(blocks, block_tokens)
        width = len(self.taps) * model.config.hidden
        self._kept = torch.zeros(
            blocks * block_tokens, width, dtype=model.dtype, device=model.device
        )

    def read(
        self, fed: Sequence[Sequence[int]], spans: Spans, states: Tensor | None = None
    ) -> Tensor:
        """Compute the rows' tokens; return their normed states [tokens, hidden]."""
        model = self.model
        ids = torch.tensor([t for row in fed for t in row], device=model.device)
        hidden, tapped = model.run(model.embed(ids, states), self.cache, spans, self.taps)
        if self.taps:
            self._kept[self._slots(spans)] = tapped
        return hidden

    def move(self, from_slots: Array, to_slots: Array) -> None:
        """Copy what is kept of tokens in slots i64 [n] to others; all are read before a write."""
        if len(from_slots):
            device = self.model.device
            source, target = (torch.from_numpy(s).to(device) for s in (from_slots, to_slots))
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
        found = self._kept[torch.tensor(slots, device=self.model.device)]
        if missing:
            found[missing] = 0.0
        if layers is None or tuple(layers) == self.taps:
            return found
        parts = found.split(self.model.config.hidden, 1)
        return torch.cat([parts[self.taps.index(layer)] for layer in layers], 1)

    def _slots(self, spans: Spans) -> Tensor:
        return torch.from_numpy(spans.slots(self.block_tokens)).to(self.model.device)
