"""Random passes for the Triton kernels, and what SDPA says of them.

Imported before triton is: the kernels run in its interpreter, unless TRITON_INTERPRET=0 says that
there is a GPU.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
from tests.tiny import CPU, tiny_config
from torch import Tensor

from parlay.engine.attention.paged import PagedKV
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.spans import Spans
from parlay.engine.tree import MOST_NODES, trees_of

INTERPRETED = os.environ.setdefault("TRITON_INTERPRET", "1") == "1"
DEVICE = CPU if INTERPRETED else torch.device("cuda")
pytest.importorskip("triton")

from parlay.engine.attention.triton import TritonAttention, TritonPass  # noqa: E402


@dataclasses.dataclass(slots=True)
class Case:
    """A pass over caches of equal contents: `ours` holds NaN wherever no row's text lies."""

    spans: Spans
    window: int | None
    q: Tensor
    kv: Tensor
    theirs: SdpaAttention
    ours: TritonAttention

    def expected(self) -> Tensor:
        """Return what SDPA makes of it in float32."""
        q, kv = (x.float().cpu() for x in (self.q, self.kv))
        return self.theirs(0, q, kv, self.theirs.plan(self.spans, self.window))

    def got(self, plan: TritonPass) -> Tensor:
        """Return what the kernels make of it, in float32, its padding included."""
        more = plan.shape.tokens - len(self.q)
        q, kv = (
            torch.cat((x, x.new_full((more, *x.shape[1:]), torch.nan))) for x in (self.q, self.kv)
        )
        return self.ours(0, q, kv, plan).float().cpu()


def random_case(rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> Case:
    """Draw heads, blocks, rows, trees, window and contents; half of the passes are split."""
    kv_heads, share = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 7]))
    size = int(rng.choice([1, 3, 4, 16]))
    spans, blocks = random_spans(rng, size)
    config = dataclasses.replace(
        tiny_config(8, 1),
        kv_heads=kv_heads,
        heads=kv_heads * share,
        head_dim=int(rng.choice([4, 6, 16, 20, 32, 64])),
    )
    theirs = SdpaAttention(PagedKV(config, blocks, size, torch.float32, CPU), config.heads)
    ours = TritonAttention(PagedKV(config, blocks, size, dtype, DEVICE), config.heads)
    ours.processors = int(rng.choice([1, 64]))
    torch_rng = torch.Generator().manual_seed(int(rng.integers(1 << 30)))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch_rng).to(dtype)

    pool = theirs.cache.pool
    pool.copy_(drawn(*pool.shape).float())
    ours.cache.pool.copy_(pool)
    by_slot(ours.cache)[:, :, torch.from_numpy(unused_slots(spans, blocks, size))] = torch.nan
    tokens, dim = sum(spans.lengths), config.head_dim
    turned = drawn(tokens, config.heads + 2 * kv_heads, dim).to(DEVICE)
    q, kv = turned[:, : config.heads], turned[:, config.heads :]
    window = None if rng.random() < 0.6 else int(rng.choice([1, 2, 5, 17, 70]))
    return Case(spans, window, q, kv, theirs, ours)


def random_spans(rng: np.random.Generator, size: int) -> tuple[Spans, int]:
    """Return spans whose blocks lie in no order, and how many blocks there are."""
    rows = int(rng.integers(1, 5))
    lengths = rng.integers(1, rng.choice([2, 9, 40]), rows)
    starts = rng.integers(0, rng.choice([2, 30, 200]), rows)
    trees = None
    if rng.random() < 0.6:
        most = MOST_NODES if rng.random() < 0.1 else 9
        counts = [int(rng.integers(0, most + 1)) for _ in range(rows)]
        trees = trees_of(
            [list(range(n)) for n in counts],
            [[int(rng.integers(max(-1, j - 4), j)) for j in range(n)] for n in counts],
        )
        lengths += np.asarray(counts)
    needed = -(-(starts + lengths) // size)
    blocks = int(needed.sum()) + 3
    order = rng.permutation(blocks)
    tables = [t.tolist() for t in np.split(order, np.cumsum(needed))[:rows]]
    return Spans(tables, starts.tolist(), lengths.tolist(), trees), blocks


def unused_slots(spans: Spans, blocks: int, size: int) -> np.ndarray:
    """Return the slots where no text of the pass lies."""
    ends = [s + n for s, n in zip(spans.starts, spans.lengths, strict=True)]
    texts = Spans(spans.tables, [0] * len(ends), ends).slots(size)
    return np.setdiff1d(np.arange(blocks * size), texts)


def by_slot(cache: PagedKV) -> Tensor:
    """Return the pool as [layers, 2 * kv_heads, slots, head_dim]."""
    slots = cache.blocks * cache.block_tokens
    return cache.pool.view(len(cache.pool), 2 * cache.heads, slots, cache.head_dim)
