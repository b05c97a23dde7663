"""Draft trees: who is above whom, cutting, merging, and that a shape is the best of its budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.engine.spans import Spans, kept_nodes
from parlay.engine.tree import MOST_NODES, Trees, chains, trees_of
from parlay.engine.tree_shape import best_nodes, best_shape, match_worth, merge, spend

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
    trees = chains(np.asarray([[5, 6, -1], [-1, -1, -1], [7, 8, 9]]), np.asarray([2, 0, 3]))
    expected = trees_of([[5, 6], [], [7, 8, 9]], [[-1, 0], [], [-1, 0, 1]])
    for name in Trees.__slots__:
        assert getattr(trees, name).tolist() == getattr(expected, name).tolist()
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


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_a_shape_expects_the_most_accepted_of_all_trees(
    data: st.DataObject, depth: int, width: int, nodes: int
) -> None:
    shares = st.floats(0.0, 1.0 / width)
    estimates = np.asarray([[data.draw(shares) for _ in range(width)] for _ in range(depth)])
    shape = best_shape(estimates, nodes)
    assert len(shape.parent) <= nodes
    assert np.all(np.diff(shape.worth) <= 1e-15)
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parent.tolist(), shape.rank.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    assert len(set(paths)) == len(paths)
    assert [len(p) - 1 for p in paths] == shape.depth.tolist()
    every = {
        path: float(np.prod([estimates[d, r] for d, r in enumerate(path)]))
        for length in range(1, depth + 1)
        for path in itertools.product(range(width), repeat=length)
    }
    for path, worth in zip(paths, shape.worth, strict=True):
        assert worth == pytest.approx(every[path])
    # Worth falls along a path, so no set of nodes, tree or not, can beat the largest.
    assert shape.worth.sum() == pytest.approx(sum(sorted(every.values(), reverse=True)[:nodes]))


def test_a_smaller_budget_takes_the_first_nodes() -> None:
    estimates = np.asarray([[0.5, 0.2, 0.1], [0.6, 0.1, 0.2], [0.4, 0.3, 0.0]])
    large = best_shape(estimates, 40)
    for nodes in range(20):
        small = best_shape(estimates, nodes)
        assert small.parent.tolist() == large.parent[:nodes].tolist()
        assert small.rank.tolist() == large.rank[:nodes].tolist()
    assert not len(best_shape(np.zeros((0, 3)), 5).parent)


def test_a_chain_is_best_where_a_drafter_is_sure_and_a_fan_where_it_is_not() -> None:
    sure = best_shape(np.asarray([[0.95, 0.02]] * 4), 4)
    assert sure.parent.tolist() == [-1, 0, 1, 2]
    unsure = best_shape(np.asarray([[0.3, 0.28, 0.26, 0.1]] * 4), 3)
    assert unsure.parent.tolist() == [-1, -1, -1]


def test_continuations_merge_where_they_begin_alike() -> None:
    lines = np.asarray([[1, 2, 3], [1, 2, 4], [1, 5, -1], [6, 2, 3]])
    worth = np.asarray([[0.6, 0.5, 0.3], [0.6, 0.55, 0.2], [0.4, 0.25, 0.9], [0.3, 0.1, 0.0]])
    tokens, parent, value = merge(lines, worth, 64)
    assert tokens.tolist() == [1, 2, 3, 6, 5, 4, 2]
    assert parent.tolist() == [-1, 0, 1, -1, 0, 1, 3]
    assert value == pytest.approx([0.6, 0.55, 0.3, 0.3, 0.25, 0.2, 0.1])
    few, above_few, _ = merge(lines, worth, 3)
    assert (few.tolist(), above_few.tolist()) == ([1, 2, 3], [-1, 0, 1])


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 12))
def test_merged_continuations_are_a_tree_of_their_beginnings(
    data: st.DataObject, lines: int, k: int, nodes: int
) -> None:
    tokens = np.asarray([[data.draw(st.integers(-1, 2)) for _ in range(k)] for _ in range(lines)])
    worth = np.asarray([[data.draw(st.floats(0, 1)) for _ in range(k)] for _ in range(lines)])
    token, parent, value = merge(tokens, worth, nodes)
    trees_of([token.tolist()], [parent.tolist()])
    assert np.all(np.diff(value) <= 0.0)
    beginnings = {
        tuple(line[: i + 1])
        for line in tokens.tolist()
        for i in range(k)
        if min(line[: i + 1]) >= 0
    }
    paths: list[tuple[int, ...]] = []
    for t, p in zip(token.tolist(), parent.tolist(), strict=True):
        paths.append((*(paths[p] if p >= 0 else ()), t))
    assert len(set(paths)) == len(paths) <= nodes
    assert set(paths) <= beginnings


def test_pruning_keeps_parents_of_what_it_keeps() -> None:
    tokens, parent, worth = best_nodes([7, 8, 9, 5], [-1, 0, 0, 2], [0.9, 0.2, 0.4, 0.4], 3)
    assert (tokens.tolist(), parent.tolist()) == ([7, 9, 5], [-1, 0, 1])
    assert worth.tolist() == [0.9, 0.4, 0.4]


def test_matches_are_worth_what_their_counts_and_the_plan_say() -> None:
    survival = np.asarray([0.6, 0.3])
    worth = match_worth(
        survival, np.asarray([5, 5, 2]), np.asarray([4, 4, 9]), np.asarray([3, 1, 2])
    )
    # Shares 3/5, 1/5 and 1/5 * 2/10; the last two part .4 by their shares of the .4 unclaimed.
    assert worth == pytest.approx(np.asarray([[0.6, 0.3], [0.2, 0.1], [0.04, 0.02]]))
    nothing = np.zeros(0, np.int32)
    assert match_worth(survival, nothing, nothing, nothing).shape == (0, 2)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(1, 5)), max_size=4),
    st.floats(0, 1),
)
def test_worths_of_matches_are_disjoint_chances(
    found: list[tuple[int, int, int]], first: float
) -> None:
    found.sort(key=lambda c: -c[0])
    match = np.asarray([m for m, _, _ in found], np.int32)
    # As many guesses as the suffix was followed by, in all.
    guesses = np.asarray([g for _, _, g in found], np.int32)
    count = np.asarray([guesses[match == m].sum() + e for m, e, _ in found], np.int32)
    survival = np.asarray([first, first * 0.5])
    worth = match_worth(survival, match, count, guesses)
    assert np.all(worth >= 0.0)
    assert worth[:, 0].sum() <= 1.0 + 1e-9
    assert np.all(worth[:, 1] <= worth[:, 0])


def test_a_batchs_budget_goes_to_the_best_nodes_of_all_rows() -> None:
    worth = [np.asarray([0.9, 0.5, 0.1]), np.zeros(0), np.asarray([0.6, 0.4])]
    assert spend(worth, 3).tolist() == [2, 0, 1]
    assert spend(worth, 9, least=0.4).tolist() == [2, 0, 1]
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
