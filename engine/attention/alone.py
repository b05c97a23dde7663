"""Attention that gives a token the same bits in every batch: each one attends alone.

It attends over exactly the keys that it sees, in the order of their positions, so that neither its
neighbours nor where its row's blocks lie change the shape of a product, and with it the order in
which sums are rounded. One small product a token and layer: exact, and slow on prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.attention.paged import PagedKV, pool_rows
from parlay.engine.attention.sdpa import attend_by_gemm
from parlay.engine.spans import Spans


@dataclass(slots=True)
class Alone:
    """A pass: token positions i64 [tokens], where their keys and values go i64 [2 * kv_heads *
    tokens], and for each token the slots that it sees, i64 [keys].
    """  # noqa: D205

    positions: Tensor
    slots: Tensor
    seen: list[Tensor]


class AloneAttention:
    """Attention of one model over its PagedKV, token by token."""

    def __init__(self, cache: PagedKV, heads: int) -> None:
        self.cache, self.heads = cache, heads

    def plan(self, spans: Spans, window: int | None = None) -> Alone:
        """Lay out a pass; window: how many positions each token sees, None: all."""
        device, size = self.cache.layers[0].device, self.cache.block_tokens
        base, mask = spans.seen()
        ends = np.cumsum(spans.lengths)
        seen: list[Tensor] = []
        for row, (start, length) in enumerate(zip(spans.starts, spans.lengths, strict=True)):
            blocks = torch.tensor(spans.tables[row][: -(-(start + length) // size)])
            slots = (blocks[:, None] * size + torch.arange(size)).reshape(-1).to(device)
            for token in range(int(ends[row]) - length, int(ends[row])):
                text, bits = int(base[token]), int(mask[token])
                keys = slots[:text]
                if bits:
                    places = [text + j for j in range(bits.bit_length()) if bits >> j & 1]
                    keys = torch.cat((keys, slots[places]))
                # Ancestors follow the text, each a position further: the last keys are the nearest.
                seen.append(keys if window is None else keys[-window:])
        positions = torch.from_numpy(spans.positions()).to(device)
        return Alone(positions, pool_rows(self.cache, spans), seen)

    def __call__(self, layer: int, q: Tensor, kv: Tensor, plan: Alone) -> Tensor:
        """Append kv to the cache, then attend; see `Attention`."""
        heads, dim = self.cache.heads, self.cache.head_dim
        pool = self.cache.layers[layer]
        pool.index_copy_(0, plan.slots, kv.reshape(-1, dim))
        by_head = pool.view(2 * heads, -1, dim)
        out = torch.empty_like(q)
        for token, slots in enumerate(plan.seen):
            keys, values = by_head.index_select(1, slots).chunk(2)
            query = q[token].view(heads, -1, dim)
            mask = query.new_zeros(()).expand(heads, query.shape[1], len(slots))
            out[token] = attend_by_gemm(query, keys, values, mask).view(self.heads, dim)
        return out

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy keys and values between slots; see `PagedKV.move`."""
        self.cache.move(from_slots, to_slots)
