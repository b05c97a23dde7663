"""Where keys and values lie, and which of them a step touches.

A layer's pool is [2 * kv_heads * blocks * block_tokens, head_dim]: keys before values, then by
head, block and offset, so that one gather of whole blocks yields [2, batch, kv_heads, tokens,
head_dim] and a step's new keys and values are one scatter. Indices are made once a step and serve
every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from parlay.engine.model_config import ModelConfig
from parlay.engine.spans import Spans
from parlay.engine.tree import Trees

WIDE = 32
"""Rows with more query tokens are attended alone, so that nobody is padded to a prompt."""
GROUP_COST = 16
"""Padded query tokens that cost a step of the default model as much time as another group does."""


class PagedKV:
    """The keys and values of one model, every layer, in blocks.

    pool [layers, 2 * kv_heads * blocks * block_tokens, head_dim]; layers: its parts.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks, self.block_tokens = blocks, block_tokens
        self.heads, self.head_dim = config.kv_heads, config.head_dim
        rows = 2 * config.kv_heads * blocks * block_tokens
        self.pool = torch.zeros(config.layers, rows, config.head_dim, dtype=dtype, device=device)
        self.layers = list(self.pool.unbind())

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy the keys and values of slots i64 [n] to others, in every layer.

        A slot is block * block_tokens + offset. All are read before any is written.
        """
        device = self.layers[0].device
        head = torch.arange(2 * self.heads, device=device) * (self.blocks * self.block_tokens)
        source, target = (
            (slots.to(device)[:, None] + head).reshape(-1) for slots in (from_slots, to_slots)
        )
        for pool in self.layers:
            pool.index_copy_(0, target, pool.index_select(0, source))


@dataclass(slots=True)
class Group:
    """Rows attended together, padded to the same numbers of query and key tokens.

    queries: where the group's tokens stand in the flat batch, i64 [batch * q] (None: all of it, in
    order); valid: which of those are real, i64, where padded. blocks i64 [2 * kv_heads * batch * n]
    to gather. mask: float [batch * kv_heads, share * q, n * block_tokens], 0 or -inf, for the
    `share` query heads of each KV head.
    """

    batch: int
    q: int
    queries: Tensor | None
    valid: Tensor | None
    blocks: Tensor
    mask: Tensor


@dataclass(slots=True)
class Ragged:
    """A ragged pass over a paged cache: token positions i64 [tokens], where each one's keys and
    values go i64 [2 * kv_heads * tokens], and the groups that attend.
    """  # noqa: D205

    positions: Tensor
    slots: Tensor
    groups: list[Group]


class Pass(Protocol):
    """A pass as an attention lays it out; positions i64 [tokens]."""

    positions: Tensor


class Attention(Protocol):
    """Appends a step's keys and values to the cache and attends; one implementation a file."""

    def plan(self, spans: Spans, window: int | None = None) -> Any:
        """Lay out a `Pass` over `spans`, for every layer; window: positions seen, None: all."""
        ...

    def __call__(self, layer: int, q: Tensor, kv: Tensor, plan: Any) -> Tensor:
        """Return [tokens, heads, head_dim]; q is alike, kv [tokens, 2 * kv_heads, head_dim]."""
        ...

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy keys and values between slots; see `PagedKV.move`."""
        ...


def pool_rows(cache: PagedKV, spans: Spans) -> Tensor:
    """Return where in a layer's pool a pass's keys and values go, i64 [2 * kv_heads * tokens]."""
    slots = torch.from_numpy(spans.slots(cache.block_tokens))
    head = torch.arange(2 * cache.heads) * (cache.blocks * cache.block_tokens)
    return (slots[:, None] + head).reshape(-1).to(cache.layers[0].device)


def plan_ragged(cache: PagedKV, spans: Spans, share: int, window: int | None = None) -> Ragged:
    """Lay out a pass over `spans`.

    share: query heads a KV head; window: how many positions each token sees, its own included
    (None: all).
    """
    device, size = cache.layers[0].device, cache.block_tokens
    positions, slots = torch.from_numpy(spans.positions()), pool_rows(cache, spans)
    if window is not None:
        # Blocks that lie before all that a row sees are not even gathered.
        skipped = [max(s + 1 - window, 0) // size for s in spans.starts]
        tables = [table[n:] for table, n in zip(spans.tables, skipped, strict=True)]
        starts = [s - n * size for s, n in zip(spans.starts, skipped, strict=True)]
        spans = Spans(tables, starts, spans.lengths, spans.trees)
    groups = [_group(cache, spans, rows, share, window) for rows in _split(spans.lengths)]
    return Ragged(positions.to(device), slots, groups)


def _split(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of each group: narrow ones together or in two, each wide one alone."""
    narrow = [r for r, n in enumerate(lengths) if n <= WIDE]
    return _halve(narrow, lengths) + [[r] for r, n in enumerate(lengths) if n > WIDE]


def _halve(rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Part the short rows from the long ones where that saves more padding than a group costs."""
    if not rows:
        return []
    order = sorted(rows, key=lambda r: lengths[r])
    longest = lengths[order[-1]]
    saved = [(i * (longest - lengths[order[i - 1]]), i) for i in range(1, len(order))]
    most, at = max(saved, default=(0, 0))
    return [rows] if most <= GROUP_COST else [sorted(order[:at]), sorted(order[at:])]


def _group(cache: PagedKV, spans: Spans, rows: list[int], share: int, window: int | None) -> Group:
    device, dtype, size = cache.layers[0].device, cache.layers[0].dtype, cache.block_tokens
    lengths = spans.lengths
    batch, q = len(rows), max(lengths[r] for r in rows)
    counts = [-(-(spans.starts[r] + lengths[r]) // size) for r in rows]
    blocks = torch.zeros(batch, max(counts), dtype=torch.int64)
    for i, r in enumerate(rows):
        blocks[i, : counts[i]] = torch.tensor(spans.tables[r][: counts[i]])
    head = (torch.arange(2 * cache.heads) * cache.blocks).view(2, 1, cache.heads, 1)
    gather = (head + blocks[None, :, None, :]).reshape(-1)

    length = torch.tensor([lengths[r] for r in rows])
    step = torch.arange(q)
    offset = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    queries = offset[rows][:, None] + torch.minimum(step, length[:, None] - 1)
    hidden = _hidden(spans, rows, queries, blocks.shape[1] * size, window)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    mask = (
        mask[:, None, None]
        .expand(-1, cache.heads, share, -1, -1)
        .reshape(batch * cache.heads, share * q, -1)
    )

    whole = batch == len(lengths) and batch * q == sum(lengths)
    valid = (
        None
        if batch * q == int(length.sum())
        else torch.nonzero((step < length[:, None]).reshape(-1))[:, 0]
    )
    return Group(
        batch, q, None if whole else queries.reshape(-1).to(device),
        None if valid is None else valid.to(device), gather.to(device), mask.to(device),
    )  # fmt: skip


def _hidden(
    spans: Spans, rows: list[int], queries: Tensor, keys: int, window: int | None
) -> Tensor:
    """Return which of its row's first `keys` places each query must not see: bool [batch, q, keys].

    queries i64 [batch, q]: tokens of the flat pass.
    """
    base, mask = (torch.from_numpy(a)[queries][:, :, None] for a in spans.seen())
    trees = spans.trees
    # A tree's mask may reach beyond the last key; those places are cut off again.
    reach = 0 if trees is None else int(trees.counts.max(initial=0))
    key = torch.arange(keys + reach)
    hidden = key >= base
    if reach:
        bit = torch.arange(reach)
        hidden.scatter_(2, base + bit, (mask >> bit) & 1 == 0)
        hidden, key = hidden[:, :, :keys], key[:keys]
    if window is not None:
        key = (
            key.expand(len(rows), -1) if trees is None else _key_positions(spans, trees, rows, key)
        )
        position = torch.from_numpy(spans.positions())[queries]
        hidden |= key[:, None] <= position[:, :, None] - window
    return hidden


def _key_positions(spans: Spans, trees: Trees, rows: list[int], place: Tensor) -> Tensor:
    """Return the position of each key place [keys] for each row: a node's is its depth's."""
    position = place.repeat(len(rows), 1)
    for i, r in enumerate(rows):
        depth = torch.from_numpy(trees.depth[trees.starts[r] : trees.starts[r + 1]])
        end = spans.starts[r] + spans.lengths[r]
        position[i, end - len(depth) : end] = end - len(depth) + depth
    return position
