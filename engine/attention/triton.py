"""Paged attention by Triton kernels, on CUDA; on a CPU in Triton's interpreter, for tests.

A pass is a set of device arrays of a fixed size, and nothing that a kernel is launched with depends
on what is in them: a CUDA graph captured over a pass is replayed for any step that fits it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import triton
from torch import Tensor

from parlay.engine.attention import triton_kernels as kernels
from parlay.engine.attention.paged import PagedKV
from parlay.engine.spans import Spans
from parlay.engine.tree import places_in_rows
from parlay.policies.types import Array

TILE_BYTES = 16384
"""Of a tile of queries, and of one of keys: larger ones spill registers (compiled for sm_80/90)."""
TILE = 64
"""The most rows of either tile."""
LEAST = 16
"""The fewest rows and columns that `tl.dot` multiplies."""
SPLIT_TOKENS = 128
"""A split of fewer tokens costs more to put together than it saves."""
MOST_SPLITS = 64
FLAT = 1024
"""Numbers that a program appends."""
WAVES = 4
"""Programs a multiprocessor should have: one computes while the others wait for memory."""

OPTIONS = {"enable_fp_fusion": True}
"""Of every launch: said, because Triton 3.9 warns where it is not, and 3.10 turns it off."""
LOG2_E = math.log2(math.e)

S = TypeVar("S", Tensor, Array)


@dataclass(frozen=True, slots=True)
class Shape:
    """How much a pass holds, and how its kernels cut it.

    tokens, rows; width: blocks of a row. tile_tokens: a row's query tokens that share a program,
    tiles: how many such tiles any step can need. queries, keys: BLOCK_M and BLOCK_N of the kernel.
    splits: programs that share a tile's text.
    """

    tokens: int
    rows: int
    width: int
    tile_tokens: int
    tiles: int
    queries: int
    keys: int
    splits: int

    @property
    def head_longs(self) -> int:
        """Return the 64-bit words before the block table, which lies last."""
        return 4 * self.tokens + 3 * self.tiles

    @property
    def longs(self) -> int:
        """Return the 64-bit words of a packed pass."""
        return self.head_longs + -(-self.rows * self.width // 2)


@dataclass(slots=True)
class TritonPass:
    """A pass: views of `packed` i64 [longs], on one device.

    By token [tokens]: positions i64; slots i64, -1 for a token that is not there; mask i64, base
    and low i32: it sees places low .. base - 1, and base + j where bit j of mask is set. By tile
    [tiles], i32: tile_row, tile_first (its first token in the pass), tile_count (0: nothing); and
    of the places that any of its tokens sees: all are in tile_low .. tile_stop - 1, and those
    before tile_text are no tree's nodes. By row: table i32 [rows, width], its blocks.
    """

    shape: Shape
    packed: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor
    base: Tensor
    low: Tensor
    tile_row: Tensor
    tile_first: Tensor
    tile_count: Tensor
    tile_low: Tensor
    tile_text: Tensor
    tile_stop: Tensor
    table: Tensor


class TritonAttention:
    """Attention of one model over its PagedKV.

    processors: multiprocessors to keep busy; a CPU's interpreter is one.
    """

    def __init__(self, cache: PagedKV, heads: int) -> None:
        self.cache, self.heads = cache, heads
        self.device, self.dtype = cache.layers[0].device, cache.layers[0].dtype
        self.on_cuda = self.device.type == "cuda"
        self.processors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count
            if self.on_cuda
            else 1
        )
        # The interpreter multiplies bfloat16 as integers, and cuts where it should round.
        self._widen = not self.on_cuda and self.dtype is torch.bfloat16
        self._head_stride = cache.blocks * cache.block_tokens * cache.head_dim
        self._block_d = max(triton.next_power_of_2(cache.head_dim), LEAST)

    def plan(self, spans: Spans, window: int | None = None) -> TritonPass:
        """Lay out a pass of just the size of `spans`; window: positions seen, None: all."""
        ends = [s + n for s, n in zip(spans.starts, spans.lengths, strict=True)]
        blocks = max((-(-end // self.cache.block_tokens) for end in ends), default=1)
        made = self.static(sum(spans.lengths), len(ends), blocks)
        self.fill(made, spans, window)
        return made

    def static(self, tokens: int, rows: int, blocks: int) -> TritonPass:
        """Return an empty pass for steps of up to so many tokens, rows, and blocks of a row."""
        shape = self._shape(tokens, rows, blocks)
        # A tensor of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            packed = torch.zeros(shape.longs, dtype=torch.int64, device=self.device)
            made = TritonPass(shape, packed, *_parts(packed, packed.view(torch.int32), shape))
            made.slots.fill_(-1)
        return made

    def fill(self, into: TritonPass, spans: Spans, window: int | None = None) -> None:
        """Write a step into a pass that it fits, by one copy to the device.

        The copy is enqueued on the current stream, and waits for nothing.
        """
        shape, size = into.shape, self.cache.block_tokens
        # Pinned memory is not given out again before the copies from it are done.
        staging = torch.empty(shape.longs, dtype=torch.int64, pin_memory=self.on_cuda)
        longs = staging.numpy()
        positions, slots, mask, base, low, *tiled, table = _parts(
            longs, longs.view(np.int32), shape
        )
        longs[: shape.head_longs] = 0
        n = np.asarray(spans.lengths, np.int64)
        tokens, ends = int(n.sum()), np.asarray(spans.starts, np.int64) + n
        assert tokens <= shape.tokens, "the step has more tokens than its pass"
        assert len(n) <= shape.rows, "the step has more rows than its pass"
        positions[:tokens] = spans.positions()
        slots[:tokens], slots[tokens:] = spans.slots(size), -1
        base[:tokens], mask[:tokens] = spans.seen()
        if window is not None:
            low[:tokens] = np.maximum(positions[:tokens] + 1 - window, 0)
            _keep_nearest(mask[:tokens], window)
        _fill_tiles(shape, tiled, n, ends, (base, low, mask))
        for r, blocks in enumerate((-(-ends // size)).tolist()):
            table[r, :blocks] = spans.tables[r][:blocks]
        copied = shape.head_longs + -(-len(n) * shape.width // 2)
        into.packed[:copied].copy_(staging[:copied], non_blocking=True)

    def __call__(self, layer: int, q: Tensor, kv: Tensor, plan: TritonPass) -> Tensor:
        """Append kv to the cache, then attend; see `Attention`.

        What a token that is not there gets is zeros.
        """
        cache, shape = self.cache, plan.shape
        pool, heads, dim = cache.layers[layer], self.heads, cache.head_dim
        assert len(q) == len(kv) == shape.tokens, "a pass is computed whole, its padding included"
        q, kv = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (q, kv))
        out = q.new_empty(q.shape, dtype=torch.float32 if self._widen else q.dtype)
        block_d, wide = self._block_d, max(2 * cache.heads, heads) * dim
        kernels.append[(triton.cdiv(shape.tokens * wide, FLAT),)](
            kv, pool, out, plan.slots, shape.tokens, kv.stride(0), self._head_stride,
            PARTS=2 * cache.heads, HEADS=heads, DIM=dim, WIDE=wide, BLOCK=FLAT, **OPTIONS,
        )  # fmt: skip
        tops = totals = parts = out
        if shape.splits > 1:
            split = (shape.tokens, heads, shape.splits)
            tops, totals = (q.new_empty(split, dtype=torch.float32) for _ in range(2))
            parts = q.new_empty((*split, dim), dtype=torch.float32)
        kernels.attend[(shape.tiles, cache.heads, shape.splits)](
            q, pool, out, tops, totals, parts, plan.tile_row, plan.tile_first, plan.tile_count,
            plan.tile_low, plan.tile_text, plan.tile_stop, plan.table, plan.low, plan.base,
            plan.mask, shape.width, q.stride(0), self._head_stride, dim**-0.5 * LOG2_E,
            HEADS=heads, SHARE=heads // cache.heads, DIM=dim, BLOCK_TOKENS=cache.block_tokens,
            BLOCK_M=shape.queries, BLOCK_N=shape.keys, BLOCK_D=block_d, SPLITS=shape.splits,
            WIDEN=self._widen, **OPTIONS,
        )  # fmt: skip
        if shape.splits > 1:
            kernels.reduce[(shape.tokens, heads)](
                parts, tops, totals, out, plan.slots,
                HEADS=heads, DIM=dim, BLOCK_D=block_d, SPLITS=shape.splits, **OPTIONS,
            )  # fmt: skip
        return out.to(q.dtype)

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy keys and values between slots i64 [n], in every layer; -1 in both: nothing.

        All are read before any is written.
        """
        cache, moved = self.cache, len(from_slots)
        if not moved:
            return
        parts, dim, pool = 2 * cache.heads, cache.head_dim, cache.pool
        staging = pool.new_empty(len(pool), moved, parts, dim)
        for back, slots in enumerate((from_slots, to_slots)):
            kernels.copy_slots[(moved, len(pool))](
                pool, staging, slots.to(self.device), pool.stride(0), self._head_stride,
                PARTS=parts, DIM=dim, BLOCK_P=triton.next_power_of_2(parts),
                BLOCK_D=self._block_d, BACK=bool(back), **OPTIONS,
            )  # fmt: skip

    def _shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        """Choose how a pass is cut, from what it can hold.

        A tile takes the tokens that a row has if all have alike, so that a row's text is read once
        where the registers allow. Texts are split where tiles and KV heads are too few programs.
        """
        share = self.heads // self.cache.heads
        most = max(min(TILE_BYTES // (self._block_d * self.dtype.itemsize), TILE), LEAST)
        alike = -(-tokens // max(rows, 1))
        wanted = triton.next_power_of_2(share * alike)
        queries = max(min(wanted, most), triton.next_power_of_2(share), LEAST)
        tile_tokens = queries // share
        # Each row begins a tile; what it has beyond its first token fills others.
        tiles = min(rows, tokens) + max(tokens - rows, 0) // tile_tokens
        programs = max(rows * -(-alike // tile_tokens), 1) * self.cache.heads
        idle = max(WAVES * self.processors // programs, 1)
        fit = max(blocks * self.cache.block_tokens // SPLIT_TOKENS, 1)
        splits = min(idle, fit, MOST_SPLITS)
        return Shape(
            tokens, rows, blocks, tile_tokens, tiles, queries, most, 1 << splits.bit_length() - 1
        )


def _fill_tiles(
    shape: Shape, tiled: list[Array], lengths: Array, ends: Array, step: tuple[Array, Array, Array]
) -> None:
    """Cut rows of `lengths` tokens into tiles; step: the pass's base, low and mask."""
    base, low, mask = step
    row, first, count, lowest, text, stop = tiled
    tiles = -(-lengths // shape.tile_tokens)
    used = int(tiles.sum())
    ahead = places_in_rows(tiles) * shape.tile_tokens
    row[:used] = np.repeat(np.arange(len(lengths)), tiles)
    first[:used] = np.repeat(np.cumsum(lengths) - lengths, tiles) + ahead
    count[:used] = np.minimum(np.repeat(lengths, tiles) - ahead, shape.tile_tokens)
    of_row = np.repeat(ends, lengths)
    upto = np.where(mask[: len(of_row)] != 0, of_row, base[: len(of_row)])
    for least, of_tile, of_token in (
        (np.minimum, lowest, low), (np.minimum, text, base), (np.maximum, stop, upto)
    ):  # fmt: skip
        of_tile[:used] = least.reduceat(of_token[: len(of_row)], first[:used])


def _parts(longs: S, words: S, shape: Shape) -> list[S]:
    """Return a pass's arrays, of `TritonPass` from positions on; words are longs as i32."""
    t, rows = shape.tokens, shape.rows
    parts = [longs[:t], longs[t : 2 * t], longs[2 * t : 3 * t]]
    at = 6 * t
    for size in [t] * 2 + [shape.tiles] * 6:
        parts.append(words[at : at + size])
        at += size
    at = 2 * shape.head_longs
    parts.append(words[at : at + rows * shape.width].reshape(rows, shape.width))
    return parts


def _keep_nearest(mask: Array, window: int) -> None:
    """Clear all bits but the highest `window` of each mask, i64, in place.

    A node's ancestors stand in order of their depths, itself last: beyond a window the first are.
    """
    bits = mask.view(np.uint64)
    while (many := np.bitwise_count(bits) > window).any():
        bits[many] &= bits[many] - np.uint64(1)
