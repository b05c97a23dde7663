"""Which positions of which texts a pass computes. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.engine.tree import Trees, places_in_rows
from parlay.policies.types import Array


@dataclass(slots=True)
class Spans:
    """Row r is places starts[r] .. starts[r] + lengths[r] - 1 of a text whose blocks are tables[r];
    rows are flat and in order.

    trees: where given, a row's last tokens are its tree's nodes, one place in the cache each; a
    node's position is that of its depth, and it sees the text before the tree and its ancestors.
    Without, a token's place is its position, and it sees all before it.
    """  # noqa: D205

    tables: Sequence[Sequence[int]]
    starts: Sequence[int]
    lengths: Sequence[int]
    trees: Trees | None = None

    def places(self) -> Array:
        """Return where in its row's cache each token lies, i64 [tokens]."""
        starts, lengths = np.asarray(self.starts, np.int64), np.asarray(self.lengths, np.int64)
        begins = np.cumsum(lengths) - lengths
        return np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))

    def positions(self) -> Array:
        """Return the position of each token in its text, i64 [tokens]."""
        places = self.places()
        if self.trees is not None:
            places[self.nodes()] = self._bases(self.trees) + self.trees.depth
        return places

    def nodes(self) -> Array:
        """Return which of the pass's tokens are the trees' nodes, i64 [nodes]."""
        if self.trees is None:
            return np.zeros(0, np.int64)
        counts = self.trees.counts
        ends: Array = np.repeat(np.cumsum(self.lengths) - counts, counts)
        return ends + places_in_rows(counts)

    def seen(self) -> tuple[Array, Array]:
        """Return what each token sees: every place before base, i64 [tokens], and place base + j
        where bit j of mask, i64 [tokens] taken as 64 bits, is set.

        For a token of plain text that is its own place + 1 and 0.
        """  # noqa: D205
        base = self.places() + 1
        mask = np.zeros(len(base), np.int64)
        if self.trees is not None:
            nodes = self.nodes()
            base[nodes], mask[nodes] = self._bases(self.trees), self.trees.ancestors.view(np.int64)
        return base, mask

    def slots(self, block_tokens: int) -> Array:
        """Return where in a pool of blocks each token lies, i64 [tokens].

        Place -1, which is before the text, gets the slot of place 0.
        """
        starts, lengths = np.asarray(self.starts, np.int64), np.asarray(self.lengths, np.int64)
        low = np.maximum(starts, 0) // block_tokens
        counts = (starts + lengths - 1) // block_tokens + 1 - low
        blocks: list[int] = []
        for table, first, count in zip(self.tables, low.tolist(), counts.tolist(), strict=True):
            blocks += table[first : first + count]
        assert len(blocks) == counts.sum(), "a table is too short for its row"
        at = np.maximum(self.places(), 0)
        where = at // block_tokens + np.repeat(np.cumsum(counts) - counts - low, lengths)
        slots: Array = np.asarray(blocks, np.int64)[where] * block_tokens + at % block_tokens
        return slots

    def _bases(self, trees: Trees) -> Array:
        """Return the place of its tree's first node for every node, i64 [nodes]."""
        first = np.asarray(self.starts) + np.asarray(self.lengths) - trees.counts
        bases: Array = np.repeat(first, trees.counts)
        return bases


def kept_nodes(spans: Spans, path: Array, block_tokens: int) -> tuple[Array, Array]:
    """Return what an accepted path moves in a pool of blocks: slots from and to, i64 [moved] both.

    path i64 [rows, D]: each row's accepted nodes, -1 beyond; the node at depth j belongs at the
    tree's place j. Nodes that lie there already are left out, so plain chains move nothing. Read
    all of `from` before writing: one row's slots may be in both.
    """
    assert spans.trees is not None, "only trees leave gaps"
    row, depth = np.nonzero((path >= 0) & (path != np.arange(path.shape[1])))
    first = np.asarray(spans.starts) + np.asarray(spans.lengths) - spans.trees.counts

    def slots(places: Array) -> Array:
        at = places // block_tokens
        blocks = [spans.tables[r][b] for r, b in zip(row.tolist(), at.tolist(), strict=True)]
        found: Array = np.asarray(blocks, np.int64) * block_tokens + places % block_tokens
        return found

    return slots(first[row] + path[row, depth]), slots(first[row] + depth)
