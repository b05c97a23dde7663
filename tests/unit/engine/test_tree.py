"""Draft trees: who is above whom, cutting, merging, and that a shape is the best of its budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.engine.spans import Spans, kept_nodes
from parlay.engine.tree import MOST_NODES, Trees, trees_of
from parlay.engine.tree_shape import best_nodes, match_shares, spend

Rows = list[tuple[list[int], list[int]]]


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    """Draw rows of (tokens, parents): siblings differ because every token of a row does."""
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        n = draw(st.integers(0, 12))
        parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
        rows.append((draw(st.permutations(range(n))), parents))
    return rows


def made(rows: Rows) -> Trees:
    return trees_of([t for t, _ in rows], [p for _, p in rows])


def above(parents: list[int], node: int) -> set[int]:
    return set() if node < 0 else {node} | above(parents, parents[node])


@given(some_rows())
def test_every_node_knows_whom_it_descends_from(rows: Rows) -> None:
    trees = made(rows)
    assert len(trees) == len(rows)
    for r, (tokens, parents) in enumerate(rows):
        mine = slice(trees.starts[r], trees.starts[r + 1])
        assert trees.tokens[mine].tolist() == list(tokens)
        for node, bits in enumerate(trees.ancestors[mine].tolist()):
            assert {j for j in range(64) if bits >> j & 1} == above(parents, node)
            assert trees.depth[mine][node] == len(above(parents, node)) - 1
    assert trees.straight().tolist() == [p == list(range(-1, len(p) - 1)) for _, p in rows]


@given(some_rows(), st.data())
def test_a_prefix_of_a_tree_is_a_tree(rows: Rows, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, len(t) + 2)) for t, _ in rows]
    cut = made(rows).first(np.asarray(counts, np.int64))
    again = made([(t[:n], p[:n]) for (t, p), n in zip(rows, counts, strict=True)])
    for name in Trees.__slots__:
        assert getattr(cut, name).tolist() == getattr(again, name).tolist()


def test_chains_are_trees_whose_parents_come_right_before() -> None:
    trees = trees_of([[5, 6], [], [7, 8, 9]], [[-1, 0], [], [-1, 0, 1]])
    assert trees.starts.tolist() == [0, 2, 2, 5]
    assert trees.depth.tolist() == [0, 1, 0, 1, 2]
    assert trees.ancestors.tolist() == [1, 3, 1, 3, 7]
    assert trees.straight().all()
    assert trees.padded_tokens().tolist() == [[5, 6, -1], [-1, -1, -1], [7, 8, 9]]


def test_the_deepest_tree_fills_the_mask() -> None:
    trees = trees_of([range(MOST_NODES)], [range(-1, MOST_NODES - 1)])
    assert int(trees.ancestors[-1]) == 2**64 - 1
    assert trees.depth[-1] == MOST_NODES - 1


@pytest.mark.parametrize(
    ("tokens", "parents", "match"),
    [
        ([1, 2], [-1, 1], "before"),
        ([1, 2], [-1, -2], "before"),
        ([1, 3, 1], [-1, 0, -1], "same token"),
        ([1, 2], [-1], "as many"),
        (list(range(65)), [-1] * 65, "at most 64"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        trees_of([[4], tokens], [[-1], parents])


def test_two_cousins_may_share_a_token() -> None:
    assert len(trees_of([[1, 2, 3, 3], [1]], [[-1, -1, 0, 1], [-1]]).tokens) == 5


def test_pruning_keeps_parents_of_what_it_keeps() -> None:
    tokens, parent, worth = best_nodes([7, 8, 9, 5], [-1, 0, 0, 2], [0.9, 0.2, 0.4, 0.4], 3)
    assert (tokens.tolist(), parent.tolist()) == ([7, 9, 5], [-1, 0, 1])
    assert worth.tolist() == [0.9, 0.4, 0.4]


def test_matches_share_what_their_counts_say() -> None:
    shares = match_shares(np.asarray([5, 5, 2]), np.asarray([4, 4, 9]), np.asarray([3, 1, 2]))
    # The short match has what the long one leaves unseen, 1/5.
    assert shares == pytest.approx([3 / 5, 1 / 5, 1 / 5 * 2 / 10])
    nothing = np.zeros(0, np.int32)
    assert match_shares(nothing, nothing, nothing).shape == (0,)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(1, 5)), max_size=4),
)
def test_shares_of_matches_are_disjoint_chances(found: list[tuple[int, int, int]]) -> None:
    found.sort(key=lambda c: -c[0])
    match = np.asarray([m for m, _, _ in found], np.int32)
    # As many guesses as the suffix was followed by, in all.
    guesses = np.asarray([g for _, _, g in found], np.int32)
    count = np.asarray([guesses[match == m].sum() + e for m, e, _ in found], np.int32)
    shares = match_shares(match, count, guesses)
    assert np.all(shares >= 0.0)
    assert shares.sum() <= 1.0 + 1e-9


def test_a_batchs_budget_goes_to_the_best_nodes_of_all_rows() -> None:
    worth = [np.asarray([0.9, 0.5, 0.1]), np.zeros(0), np.asarray([0.6, 0.4])]
    assert spend(worth, 3).tolist() == [2, 0, 1]
    assert spend(worth, 9).tolist() == [3, 0, 2]
    assert spend(worth, 0).tolist() == [0, 0, 0]
    assert spend([], 4).tolist() == []


def test_spans_say_where_nodes_lie_what_they_see_and_what_moves() -> None:
    trees = trees_of([[1, 2, 3, 4], [], [5, 6]], [[-1, -1, 1, 0], [], [-1, 0]])
    spans = Spans([[4, 2], [0], [7, 9]], [2, 0, 1], [5, 3, 4], trees)
    assert spans.places().tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 1, 2, 3, 4]
    assert spans.positions().tolist() == [2, 3, 3, 4, 4, 0, 1, 2, 1, 2, 3, 4]
    assert spans.slots(4).tolist() == [18, 19, 8, 9, 10, 0, 1, 2, 29, 30, 31, 36]
    base, mask = spans.seen()
    assert base.tolist() == [3, 3, 3, 3, 3, 1, 2, 3, 2, 3, 3, 3]
    assert mask.tolist() == [0, 1, 2, 6, 9, 0, 0, 0, 0, 0, 1, 3]
    source, target = kept_nodes(spans, np.asarray([[1, 2], [-1, -1], [0, 1]]), 4)
    assert (source.tolist(), target.tolist()) == ([8, 9], [19, 8])
