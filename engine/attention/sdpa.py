"""Paged attention by gathering blocks and torch's scaled_dot_product_attention: any device, any dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.attention.paged import Group, PagedKV, Ragged


class SdpaAttention:
    """Attention of one model over its PagedKV."""

    def __init__(self, cache: PagedKV, heads: int) -> None:
        self.cache = cache
        self.heads = heads

    def __call__(self, layer: int, q: Tensor, kv: Tensor, ragged: Ragged) -> Tensor:
        """Append kv to the cache, then attend; see `Attention`."""
        pool = self.cache.layers[layer]
        pool.index_copy_(0, ragged.slots, kv.reshape(-1, self.cache.head_dim))
        if len(ragged.groups) == 1:
            group = ragged.groups[0]
            out = self._attend(pool, q if group.queries is None else q[group.queries], group)
            return out if group.valid is None else out[group.valid]
        out = torch.empty_like(q)
        for group in ragged.groups:
            assert group.queries is not None
            mixed = self._attend(pool, q[group.queries], group)
            # Padding repeats a row's last query, so writing it twice writes the same.
            out[group.queries] = mixed
        return out

    def _attend(self, pool: Tensor, q: Tensor, group: Group) -> Tensor:
        """Attend q [batch * q, heads, head_dim] to its own rows' keys; the heads of a KV head are rows."""
        heads, dim, b = self.cache.heads, self.cache.head_dim, group.batch
        blocks = pool.view(-1, self.cache.block_tokens * dim).index_select(0, group.blocks)
        k, v = blocks.view(2, b, heads, -1, dim)
        share = self.heads // heads
        q = q.view(b, group.q, heads, share, dim).permute(0, 2, 3, 1, 4).reshape(b, heads, -1, dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        return out.view(b, heads, share, group.q, dim).permute(0, 3, 1, 2, 4).reshape(-1, self.heads, dim)
