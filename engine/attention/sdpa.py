"""Paged attention: gather blocks, then scaled_dot_product_attention or two batched GEMMs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.attention.paged import Group, PagedKV, Ragged, plan_ragged
from parlay.engine.spans import Spans


class SdpaAttention:
    """Attention of one model over its PagedKV."""

    def __init__(self, cache: PagedKV, heads: int) -> None:
        self.cache = cache
        self.heads = heads
        pool = cache.layers[0]
        self._mix = (
            attend_by_gemm if pool.device.type == "cpu" and pool.dtype is torch.bfloat16 else _sdpa
        )

    def plan(self, spans: Spans, window: int | None = None) -> Ragged:
        """Lay out a pass; window: how many positions each token sees, None: all."""
        return plan_ragged(self.cache, spans, self.heads // self.cache.heads, window)

    def __call__(self, layer: int, q: Tensor, kv: Tensor, plan: Ragged) -> Tensor:
        """Append kv to the cache, then attend; see `Attention`."""
        pool = self.cache.layers[layer]
        pool.index_copy_(0, plan.slots, kv.reshape(-1, self.cache.head_dim))
        if len(plan.groups) == 1:
            group = plan.groups[0]
            out = self._attend(pool, q if group.queries is None else q[group.queries], group)
            return out if group.valid is None else out[group.valid]
        out = torch.empty_like(q)
        for group in plan.groups:
            assert group.queries is not None
            mixed = self._attend(pool, q[group.queries], group)
            # Padding repeats a row's last query, so writing it twice writes the same.
            out[group.queries] = mixed
        return out

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy keys and values between slots; see `PagedKV.move`."""
        self.cache.move(from_slots, to_slots)

    def _attend(self, pool: Tensor, q: Tensor, group: Group) -> Tensor:
        """Attend q [batch * q, heads, head_dim] to its own rows' keys."""
        heads, dim, b = self.cache.heads, self.cache.head_dim, group.batch
        blocks = pool.view(-1, self.cache.block_tokens * dim).index_select(0, group.blocks)
        k, v = blocks.view(2, b, heads, -1, dim)
        share = self.heads // heads
        # The heads that share a KV head become rows of one query, so that keys are read once.
        q = q.view(b, group.q, heads, share, dim).permute(0, 2, 3, 1, 4).reshape(b * heads, -1, dim)
        k, v = k.reshape(b * heads, -1, dim), v.reshape(b * heads, -1, dim)
        out = self._mix(q, k, v, group.mask)
        return (
            out.view(b, heads, share, group.q, dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(-1, self.heads, dim)
        )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None])[0]


def attend_by_gemm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend q, k, v [n, tokens, head_dim] by two batched GEMMs; mask [n, q tokens, k tokens].

    2.5-3 times SDPA's speed on a CPU in bf16 at batch 16.
    """
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v)
