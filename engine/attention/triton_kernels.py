# mypy: disable-error-code="untyped-decorator"
"""Kernels of paged attention in Triton; `triton.py` launches them and says what they are given.

The softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867) over tiles of keys held on
the chip (FlashAttention, arXiv 2205.14135); a long text is shared out among programs whose parts
`reduce` puts together (Flash-Decoding, as in FlashAttention-2's split over keys, arXiv 2307.08691).

Scores are in units of log2, so that exp2 serves. LOWEST stands for minus infinity: a difference of
two of it is 0, not NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["tokens"])
def append(
    kv: tl.tensor,
    pool: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Put tokens' keys and values, PARTS heads each, where slots says.

    A token without a slot (-1) gets zeros in out [tokens, HEADS, DIM] instead. Programs are flat
    over tokens * WIDE numbers; WIDE = max(PARTS, HEADS) * DIM.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number, part, d = at % WIDE, at % WIDE // DIM, at % DIM
    token = (at // WIDE).to(tl.int64)
    there = token < tokens
    slot = tl.load(slots + token, mask=there, other=-1)
    put = there & (slot >= 0) & (part < PARTS)
    got = tl.load(kv + token * token_stride + number, mask=put)
    tl.store(pool + part.to(tl.int64) * head_stride + slot * DIM + d, got, mask=put)
    nothing = tl.full((BLOCK,), 0.0, out.dtype.element_ty)
    tl.store(
        out + token * (HEADS * DIM) + number, nothing, mask=there & (slot < 0) & (part < HEADS)
    )


@triton.jit
def copy_slots(
    pool: tl.tensor,
    staging: tl.tensor,
    slots: tl.tensor,
    layer_stride: tl.tensor,
    head_stride: tl.tensor,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BACK: tl.constexpr,
) -> None:
    """Copy slots to staging [layers, moved, PARTS, DIM], or BACK from there; a slot -1 is nothing.

    One program a moved token and layer. All of one launch is done before the next begins, so that
    nothing is overwritten before it was read.
    """
    moved = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + moved)
    if slot >= 0:
        part = tl.arange(0, BLOCK_P)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        there = (part < PARTS) & (d < DIM)
        lies = pool + layer * layer_stride + part.to(tl.int64) * head_stride + slot * DIM + d
        kept = staging + ((layer * tl.num_programs(0) + moved) * PARTS + part) * DIM + d
        if BACK:
            tl.store(lies, tl.load(kept, mask=there), mask=there)
        else:
            tl.store(kept, tl.load(lies, mask=there), mask=there)


@triton.jit
def _take_in(
    query: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    base: tl.tensor,
    mask: tl.tensor,
    scale: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NODES: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tuple:
    """Take BLOCK_N places from start on, those before stop, into the softmax of every query.

    NODES: some of them may be nodes of a tree, which mask's bits show.
    """
    place = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    held = place < stop
    block = tl.load(table + place // BLOCK_TOKENS, mask=held, other=0).to(tl.int64)
    at = (block * BLOCK_TOKENS + place % BLOCK_TOKENS)[:, None] * DIM + d[None, :]
    there = held[:, None] & (d < DIM)[None, :]
    key = tl.load(keys + at, mask=there, other=0.0)
    value = tl.load(values + at, mask=there, other=0.0)
    if WIDEN:
        key, value = key.to(tl.float32), value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    seen = (place[None, :] >= low[:, None]) & (place[None, :] < base[:, None])
    if NODES:
        bit = place[None, :] - base[:, None]
        may = (bit >= 0) & (bit < 64)
        seen |= may & (((mask[:, None] >> tl.where(may, bit, 0).to(tl.int64)) & 1) != 0)
    seen &= held[None, :]
    scores = tl.where(seen, scores, LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1))
    weight = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(value.dtype), value, acc=acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["width"])
def attend(
    q: tl.tensor,
    pool: tl.tensor,
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    parts: tl.tensor,
    tile_row: tl.tensor,
    tile_first: tl.tensor,
    tile_count: tl.tensor,
    tile_low: tl.tensor,
    tile_text: tl.tensor,
    tile_stop: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    base: tl.tensor,
    mask: tl.tensor,
    width: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Attend a tile of a row's query tokens, for one KV head, over one of SPLITS parts of its text.

    Grid [tiles, kv_heads, SPLITS]. The SHARE query heads of the KV head and the tile's tokens are
    the rows of one query [BLOCK_M, BLOCK_D]. With one split out [tokens, HEADS, DIM] is written,
    else parts [tokens, HEADS, SPLITS, DIM], tops and totals [tokens, HEADS, SPLITS], all float32,
    for `reduce`. WIDEN: reckon in float32 throughout, whatever the pool holds.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tile_count + tile)
    if count == 0:
        return
    row = tl.load(tile_row + tile)
    m = tl.arange(0, BLOCK_M)
    real = m // SHARE < count
    token = (tl.load(tile_first + tile) + m // SHARE).to(tl.int64)
    heads = head * SHARE + m % SHARE
    d = tl.arange(0, BLOCK_D)
    there = real[:, None] & (d < DIM)[None, :]
    query = tl.load(
        q + (token * token_stride + heads * DIM)[:, None] + d[None, :], mask=there, other=0.0
    )
    if WIDEN:
        query = query.to(tl.float32)
    lows = tl.load(low + token, mask=real, other=0)
    bases = tl.load(base + token, mask=real, other=0)
    masks = tl.load(mask + token, mask=real, other=0)

    # This split's part of what any of the tile's tokens sees, cut at whole tiles of keys.
    first = tl.load(tile_low + tile) // BLOCK_N * BLOCK_N
    stop = tl.load(tile_stop + tile)
    each = (stop - first + BLOCK_N * SPLITS - 1) // (BLOCK_N * SPLITS) * BLOCK_N
    first += split * each
    stop = tl.minimum(stop, first + each)
    # Before this all is text, to every token.
    text = tl.load(tile_text + tile) // BLOCK_N * BLOCK_N

    acc = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    keys = pool + head.to(tl.int64) * head_stride
    values = keys + tl.num_programs(1).to(tl.int64) * head_stride
    blocks = table + row.to(tl.int64) * width
    for start in range(first, tl.minimum(stop, text), BLOCK_N):
        acc, top, total = _take_in(
            query, acc, top, total, keys, values, blocks, start, stop, lows, bases, masks, scale,
            DIM, BLOCK_TOKENS, BLOCK_N, BLOCK_D, False, WIDEN,
        )  # fmt: skip
    for start in range(tl.maximum(first, text), stop, BLOCK_N):
        acc, top, total = _take_in(
            query, acc, top, total, keys, values, blocks, start, stop, lows, bases, masks, scale,
            DIM, BLOCK_TOKENS, BLOCK_N, BLOCK_D, True, WIDEN,
        )  # fmt: skip

    at = token * HEADS + heads
    if SPLITS == 1:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + at[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=there)
    else:
        at = at * SPLITS + split
        tl.store(tops + at, top, mask=real)
        tl.store(totals + at, total, mask=real)
        # A part that nobody saw anything of is not read either.
        if first < stop:
            tl.store(parts + at[:, None] * DIM + d[None, :], acc, mask=there)


@triton.jit
def reduce(
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Put a token's splits together, for one query head; grid [tokens, HEADS]. See `attend`."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(slots + token) < 0:
        return
    split = (token * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    top, total = tl.load(tops + split), tl.load(totals + split)
    some = total > 0.0
    weight = tl.where(some, tl.exp2(top - tl.max(top, 0)), 0.0)
    there = some[:, None] & (d < DIM)[None, :]
    part = tl.load(parts + split[:, None] * DIM + d[None, :], mask=there, other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + (token * HEADS + head) * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)
