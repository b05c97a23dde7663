"""A random pass of attention, and what is right for it: dense, token by token, float32 on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.attention.paged import PagedKV
from parlay.engine.model_config import ModelConfig
from parlay.engine.spans import Spans
from parlay.engine.tree import Trees, trees_of
from parlay.policies.types import Array

BLOCK_TOKENS = 16
_HEADS = ((4, 4), (4, 2), (8, 2), (8, 1), (14, 2), (32, 8))
_HEAD_DIMS = (16, 64, 128)
_LONGEST = 700
"""Tokens of the longest text: several splits of any kernel that splits it."""
_NODES = 24


@dataclass(slots=True)
class Case:
    """One pass on the host: queries q [tokens, heads, dim], new keys and values kv [tokens,
    2 * kv_heads, dim], what a layer's pool held before, [2 * kv_heads, slots, dim].
    """  # noqa: D205

    heads: int
    kv_heads: int
    spans: Spans
    window: int | None
    blocks: int
    q: Tensor
    kv: Tensor
    pool: Tensor

    @property
    def slots(self) -> Array:
        """Return where each token's keys and values go, i64 [tokens]."""
        return self.spans.slots(BLOCK_TOKENS)


def random_case(rng: np.random.Generator, dtype: torch.dtype) -> Case:
    """Draw a ragged batch: decoding, drafts, trees and prompts, blocks in any order."""
    heads, kv_heads = _HEADS[rng.integers(len(_HEADS))]
    dim = int(rng.choice(_HEAD_DIMS))
    rows = int(rng.integers(1, 7))
    trees = _trees(rng, rows) if rng.random() < 0.4 else None
    nodes = trees.counts if trees is not None else np.zeros(rows, np.int64)
    starts = rng.integers(0, rng.integers(1, _LONGEST + 1), rows)
    most = 80 if rng.random() < 0.3 else 17
    lengths = rng.integers(1, most, rows) + nodes
    counts = -(-(starts + lengths) // BLOCK_TOKENS)
    blocks = int(counts.sum()) + 3
    order = rng.permutation(blocks)
    ends = np.cumsum(counts)
    tables = [order[end - n : end].tolist() for end, n in zip(ends, counts, strict=True)]
    spans = Spans(tables, starts.tolist(), lengths.tolist(), trees)
    window = int(rng.integers(1, 200)) if rng.random() < 0.2 else None
    draw = torch.Generator().manual_seed(int(rng.integers(2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    tokens = int(lengths.sum())
    return Case(
        heads, kv_heads, spans, window, blocks, normal(tokens, heads, dim),
        normal(tokens, 2 * kv_heads, dim), normal(2 * kv_heads, blocks * BLOCK_TOKENS, dim),
    )  # fmt: skip


def _trees(rng: np.random.Generator, rows: int) -> Trees:
    """Draw a tree a row, some of them empty; tokens differ, for siblings must."""
    counts = [int(n) for n in rng.integers(0, _NODES, rows)]
    parents = [[int(rng.integers(-1, i)) for i in range(n)] for n in counts]
    return trees_of([range(n) for n in counts], parents)


def filled_cache(case: Case, device: torch.device) -> PagedKV:
    """Return a cache of one layer on `device` that holds what the case's pool does."""
    config = ModelConfig(
        hidden=case.heads * case.q.shape[-1], layers=1, heads=case.heads, kv_heads=case.kv_heads,
        head_dim=case.q.shape[-1], ffn=1, vocab=1, rope_theta=1.0, norm_eps=1.0, context=1,
        tied=True, eos_ids=(),
    )  # fmt: skip
    cache = PagedKV(config, case.blocks, BLOCK_TOKENS, case.q.dtype, device)
    cache.layers[0].copy_(case.pool.flatten(0, 1))
    return cache


def appended(case: Case) -> Tensor:
    """Return the pool with the pass's keys and values in it."""
    pool = case.pool.clone()
    pool[:, torch.from_numpy(case.slots)] = case.kv.transpose(0, 1)
    return pool


def attended(case: Case) -> Tensor:
    """Return float32 [tokens, heads, dim]: each token over exactly the places that it sees."""
    pool, q = appended(case).float(), case.q.float()
    keys, values = pool[: case.kv_heads], pool[case.kv_heads :]
    share, scale = case.heads // case.kv_heads, q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    ends = np.cumsum(case.spans.lengths)
    for token, seen in enumerate(_seen(case)):
        row = int(np.searchsorted(ends, token, side="right"))
        table = np.asarray(case.spans.tables[row])
        slots = torch.from_numpy(table[seen // BLOCK_TOKENS] * BLOCK_TOKENS + seen % BLOCK_TOKENS)
        query = q[token].view(case.kv_heads, share, -1)
        weights = (query @ keys[:, slots].transpose(1, 2) * scale).softmax(-1)
        out[token] = (weights @ values[:, slots]).view(case.heads, -1)
    return out


def _seen(case: Case) -> list[Array]:
    """Return the places in its row's text that each token sees."""
    spans = case.spans
    base, mask = spans.seen()
    position = spans.positions()
    places, ends = spans.places(), np.cumsum(spans.lengths)
    found = []
    for token, (text, bits) in enumerate(zip(base.tolist(), mask.view(np.uint64), strict=True)):
        branch = [j for j in range(64) if int(bits) >> j & 1]
        seen = np.concatenate([np.arange(text), np.asarray([text + j for j in branch], np.int64)])
        if case.window is not None:
            row = int(np.searchsorted(ends, token, side="right"))
            begin = int(ends[row]) - spans.lengths[row]
            of_place = dict(
                zip(places[begin : ends[row]], position[begin : ends[row]], strict=True)
            )
            at = np.asarray([of_place.get(p, p) for p in seen.tolist()])
            seen = seen[at > position[token] - case.window]
        found.append(seen)
    return found
