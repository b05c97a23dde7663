"""Draft trees of a batch: which node follows which, and who is above whom. Free of torch.

A row's nodes stand in an order in which parents come before children, so the first m nodes of a
tree are a tree too: cutting it to a budget is taking a prefix. Proposers put the likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.policies.types import Array

MOST_NODES = 64
"""Nodes of a row: one bit each of the mask that says whom a node attends to."""


@dataclass(slots=True)
class Trees:
    """One draft tree a row, flat: row r has nodes starts[r] .. starts[r + 1] - 1.

    starts i64 [rows + 1]. By node: tokens i64; parent i32, counted within the row, -1 for a child
    of the last committed token; depth i32, 0 for those; ancestors u64, bit j set where node j of
    the row is the node itself or above it. A chain is the tree whose parents are j - 1.
    """

    starts: Array
    tokens: Array
    parent: Array
    depth: Array
    ancestors: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> Array:
        """Return how many nodes each row has, i64 [rows]."""
        return np.diff(self.starts)

    def straight(self) -> Array:
        """Return bool [rows]: whether a row's tree is a chain (or empty)."""
        bent = np.concatenate(([0], np.cumsum(self.parent != self._places() - 1)))
        straight: Array = bent[self.starts[1:]] == bent[self.starts[:-1]]
        return straight

    def first(self, counts: Array) -> Trees:
        """Return the trees cut to their first counts[r] nodes, i64 [rows]."""
        counts = np.minimum(counts, self.counts)
        keep = self._places() < np.repeat(counts, self.counts)
        starts = np.concatenate(([0], np.cumsum(counts)))
        return Trees(
            starts, self.tokens[keep], self.parent[keep], self.depth[keep], self.ancestors[keep]
        )

    def padded_tokens(self) -> Array:
        """Return the tokens as i64 [rows, most nodes of a row], -1 beyond a row's nodes."""
        padded: Array = np.full((len(self), int(self.counts.max(initial=0))), -1, np.int64)
        padded[np.repeat(np.arange(len(self)), self.counts), self._places()] = self.tokens
        return padded

    def _places(self) -> Array:
        """Return each node's index in its own row."""
        return places_in_rows(self.counts)


def trees_of(
    tokens: Sequence[Sequence[int] | Array], parents: Sequence[Sequence[int] | Array]
) -> Trees:
    """Build trees from each row's tokens and parents, [nodes] both.

    Raises ValueError where a parent does not come before its child, two children of a node have the
    same token, or a row has more than MOST_NODES nodes.
    """
    counts = np.asarray([len(row) for row in tokens], np.int64)
    if list(map(len, tokens)) != list(map(len, parents)):
        raise ValueError("each row needs as many parents as tokens")
    none = np.zeros(0, np.int64)
    token = np.concatenate([none, *(np.asarray(row, np.int64) for row in tokens)])
    parent = np.concatenate([none, *(np.asarray(row, np.int64) for row in parents)])
    place = places_in_rows(counts)
    if np.any(parent < -1) or np.any(parent >= place):
        raise ValueError("a node's parent must stand before it in its row, or be -1 (no node)")
    if counts.max(initial=0) > MOST_NODES:
        raise ValueError(f"a tree has at most {MOST_NODES} nodes, not {counts.max()}: cut it")
    row = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((token, parent, row))
    family = np.stack((row, parent, token))[:, order]
    if np.any((family[:, 1:] == family[:, :-1]).all(0)):
        raise ValueError("two children of one node have the same token: merge them")
    return _with_ancestors(counts, token, parent.astype(np.int32), place)


def places_in_rows(counts: Array) -> Array:
    """Return 0 .. counts[r] - 1 for each row r, flat: i64 [sum of counts]."""
    places: Array = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _with_ancestors(counts: Array, tokens: Array, parent: Array, place: Array) -> Trees:
    """Fill in depths and ancestors: each round doubles how far up every node has seen."""
    starts = np.concatenate(([0], np.cumsum(counts)))
    nodes = len(tokens)
    base = np.repeat(starts[:-1], counts)
    # One node more stands above all: it has no bit, and is its own parent.
    up = np.append(np.where(parent < 0, nodes, base + parent), nodes)
    seen = np.append(np.uint64(1) << place.astype(np.uint64), np.uint64(0))
    while np.any(up < nodes):
        seen |= seen[up]
        up = up[up]
    ancestors = seen[:nodes]
    depth = np.bitwise_count(ancestors).astype(np.int32) - 1
    return Trees(starts, tokens, parent, depth, ancestors)
