"""An attention with passes of a fixed size, on any device: what graphs run over in tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.attention.paged import PagedKV
from parlay.engine.spans import Spans


@dataclass
class StaticPass:
    """By token: positions, slots (-1: not there), base, low, mask i64 and its row's table."""

    positions: Tensor
    slots: Tensor
    base: Tensor
    low: Tensor
    mask: Tensor
    table: Tensor
    rows: int


class StaticAttention:
    """Every token attends alone to all places of its row's blocks, most of them masked."""

    def __init__(self, cache: PagedKV, heads: int) -> None:
        self.cache, self.heads = cache, heads

    def static(self, tokens: int, rows: int, blocks: int) -> StaticPass:
        a, b, c, d, e = torch.zeros(5, tokens, dtype=torch.int64).unbind()
        made = StaticPass(a, b, c, d, e, torch.zeros(tokens, blocks, dtype=torch.int64), rows)
        made.slots.fill_(-1)
        return made

    def plan(self, spans: Spans, window: int | None = None) -> StaticPass:
        widest = max(len(t) for t in spans.tables)
        made = self.static(sum(spans.lengths), len(spans.lengths), widest)
        self.fill(made, spans, window)
        return made

    def fill(self, into: StaticPass, spans: Spans, window: int | None = None) -> None:
        tokens = sum(spans.lengths)
        assert len(spans.lengths) <= into.rows
        for part in (into.positions, into.base, into.low, into.mask):
            part.zero_()
        into.slots.fill_(-1)
        base, mask = spans.seen()
        positions = spans.positions()
        into.positions[:tokens] = torch.from_numpy(positions)
        into.slots[:tokens] = torch.from_numpy(spans.slots(self.cache.block_tokens))
        into.base[:tokens], into.mask[:tokens] = torch.from_numpy(base), torch.from_numpy(mask)
        if window is not None:
            into.low[:tokens] = torch.from_numpy(np.maximum(positions + 1 - window, 0))
        of_row = np.repeat(np.arange(len(spans.lengths)), spans.lengths).tolist()
        for token, row in enumerate(of_row):
            ends = -(-(spans.starts[row] + spans.lengths[row]) // self.cache.block_tokens)
            into.table[token, :ends] = torch.tensor(list(spans.tables[row])[:ends])

    def __call__(self, layer: int, q: Tensor, kv: Tensor, plan: StaticPass) -> Tensor:
        cache, size, heads = self.cache, self.cache.block_tokens, self.cache.heads
        pool = cache.layers[layer].view(2 * heads, -1, cache.head_dim)
        there = plan.slots >= 0
        pool[:, plan.slots[there]] = kv[there].transpose(0, 1)
        place = torch.arange(plan.table.shape[1] * size)
        slots = (plan.table[:, :, None] * size + torch.arange(size)).flatten(1)
        seen = (place >= plan.low[:, None]) & (place < plan.base[:, None])
        bit = place - plan.base[:, None]
        seen |= (bit >= 0) & (bit < 64) & ((plan.mask[:, None] >> bit.clamp(0, 63)) & 1 == 1)
        k, v = (pool[part][:, slots] for part in (slice(heads), slice(heads, None)))
        k, v = (x.repeat_interleave(self.heads // heads, 0).float() for x in (k, v))
        score = torch.einsum("thd,htpd->htp", q.float(), k) * cache.head_dim**-0.5
        weight = score.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("htp,htpd->thd", weight, v).to(q.dtype)

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        self.cache.move(from_slots, to_slots)
