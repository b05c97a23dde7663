"""Which positions of which texts a pass computes. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.policies.types import Array


@dataclass(slots=True)
class Spans:
    """Row r is positions starts[r] .. starts[r] + lengths[r] - 1 of a text whose blocks are
    tables[r]; rows are flat and in order.
    """  # noqa: D205

    tables: Sequence[Sequence[int]]
    starts: Sequence[int]
    lengths: Sequence[int]

    def positions(self) -> Array:
        """Return the position of each token, i64 [tokens]."""
        starts, lengths = np.asarray(self.starts, np.int64), np.asarray(self.lengths, np.int64)
        begins = np.cumsum(lengths) - lengths
        return np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))

    def slots(self, block_tokens: int) -> Array:
        """Return where in a pool of blocks each token lies, i64 [tokens]."""
        at = self.positions()
        ends = np.cumsum(self.lengths)
        rows = np.split(at, ends[:-1])
        found = [
            np.asarray(table, np.int64)[row // block_tokens] * block_tokens + row % block_tokens
            for table, row in zip(self.tables, rows, strict=True)
        ]
        return np.concatenate(found)
