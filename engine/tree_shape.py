"""Which nodes a draft tree gets: those likeliest to be reached, as known before sampling.

A node's worth is the estimate of P(its whole path is accepted): the product of its places'. The
expected number of accepted drafts is the sum of the worths, because paths to different children of
a node exclude each other; so a budget is spent best on the largest worths, and as worth falls along
a path, the largest always form a tree (OPT-Tree, 2406.17276; Sequoia, 2402.12374, has the dynamic
program for estimates that depend on a child's rank alone). Free of torch.

Losslessness asks one thing of a shape: it is made from what was known before the target's draw,
never from that draw. Hazards, match lengths, a drafter's laws and its top-b tokens are all
functions of the committed text, so all may shape a tree of deterministic children; see
`tree_verify`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.policies.types import Array


@dataclass(slots=True)
class Shape:
    """Nodes in falling worth: parent i32 [n] (-1: the root), rank i32 [n] among a node's children
    (0: the drafter's first choice), depth i32 [n], worth f64 [n].
    """  # noqa: D205

    parent: Array
    rank: Array
    depth: Array
    worth: Array


def best_shape(estimates: Array, nodes: int) -> Shape:
    """Return the tree of `nodes` nodes with the most accepted drafts to be expected.

    estimates f64 [depth, width]: P(the drafter's token of rank r is right at a place, given that
    the path before it is), e.g. Medusa heads' measured top-b accuracies. A smaller budget's tree is
    the first nodes of this one, so one shape serves rows of every budget.
    """
    ranks = np.argsort(-estimates, axis=1, kind="stable")
    ranked = np.take_along_axis(estimates, ranks, 1)
    made: list[tuple[int, int, int, float]] = []
    # (-worth, depth, when queued, parent, index into the place's ranks, the parent's worth)
    queue = [(-float(ranked[0, 0]), 0, 0, -1, 0, 1.0)] if ranked.size else []
    queued = 1
    while queue and len(made) < nodes:
        negative, depth, _, parent, at, before = heapq.heappop(queue)
        worth = -negative
        if worth <= 0.0:
            break
        made.append((parent, int(ranks[depth, at]), depth, worth))
        if at + 1 < ranked.shape[1]:
            next_best = -before * float(ranked[depth, at + 1])
            heapq.heappush(queue, (next_best, depth, queued, parent, at + 1, before))
        if depth + 1 < len(ranked):
            child = -worth * float(ranked[depth + 1, 0])
            heapq.heappush(queue, (child, depth + 1, queued + 1, len(made) - 1, 0, worth))
        queued += 2
    columns = np.asarray(made, np.float64).reshape(-1, 4).T
    whole = columns[:3].astype(np.int32)
    return Shape(whole[0], whole[1], whole[2], columns[3])


def merge(continuations: Array, worth: Array, nodes: int) -> tuple[Array, Array, Array]:
    """Merge several continuations into a tree; return tokens i64, parent i32, worth f64 [n].

    continuations i64 [m, k], the best first, -1 beyond each one's end; worth f64 [m, k]: P(a
    continuation holds up to and with place j), falling in j. Shared beginnings become one node,
    worth the most of its continuations. The best `nodes` stay, in falling worth.
    """
    at: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    worths: list[float] = []
    for line, values in zip(continuations.tolist(), worth.tolist(), strict=True):
        node, limit = -1, 1.0
        for token, value in zip(line, values, strict=True):
            if token < 0:
                break
            found = at.setdefault((node, token), len(tokens))
            # Worth must not rise along a path, or the best would not form a tree.
            limit = min(limit, value)
            if found == len(tokens):
                tokens.append(token)
                parents.append(node)
                worths.append(limit)
            else:
                worths[found] = max(worths[found], limit)
            node = found
    return best_nodes(tokens, parents, worths, nodes)


def match_worth(
    survival: Array, match_tokens: Array, match_count: Array, guess_count: Array
) -> Array:
    """Return worth f64 [m, k] of m n-gram continuations, the best first, for `merge`.

    survival f64 [k]: P(the best one's first 1 .. k tokens are right), as the plan has it; the rest
    i32 [m] as in `Candidates`. The others share what is left at the first place, 1 - survival[0],
    as `match_shares` has it; from there on they last like the best.
    """
    share = match_shares(match_tokens, match_count, guess_count)
    if not len(share) or survival[0] <= 0.0:
        return np.zeros((len(share), len(survival)))
    first = (1.0 - survival[0]) * share / max(1.0 - share[0], 1e-9)
    first[0] = survival[0]
    worth: Array = first[:, None] * (np.asarray(survival, np.float64) / survival[0])
    return worth


def match_shares(match_tokens: Array, match_count: Array, guess_count: Array) -> Array:
    """Return f64 [m]: how likely each n-gram continuation's first token is, by counts alone.

    i32 [m] each, as in `Candidates`. A shorter match only has what the longer ones leave unseen,
    one in count + 1 (PPM, Cleary and Witten 1984).
    """
    share, left, unseen = np.zeros(len(match_tokens)), 1.0, 1.0
    for i, (count, guesses) in enumerate(zip(match_count, guess_count, strict=True)):
        if i and match_tokens[i] != match_tokens[i - 1]:
            left *= unseen
        unseen = 1.0 / (float(count) + 1.0)
        share[i] = left * float(guesses) * unseen
    return share


def best_nodes(
    tokens: Sequence[int], parents: Sequence[int], worth: Sequence[float], nodes: int
) -> tuple[Array, Array, Array]:
    """Cut a tree to its best nodes, best first; return tokens i64, parent i32 and worth f64 [n].

    Parents stand before children and are worth no less. Nodes worth 0 are dropped. A drafter grows
    a tree level by level, then prunes it by this.
    """
    value = np.asarray(worth, np.float64)
    # Stable: among equals the earlier stays first, so a parent before its child.
    order = np.argsort(-value, kind="stable")[:nodes]
    order = order[value[order] > 0.0]
    place = np.full(len(value) + 1, -1, np.int32)
    place[order] = np.arange(len(order))
    token, parent = np.asarray(tokens, np.int64), np.asarray(parents, np.int64)
    # Parent -1 reads the entry behind the last: -1 too.
    return token[order], place[parent[order]], value[order]


def spend(worth: Sequence[Array], nodes: int, least: float = 0.0) -> Array:
    """Return how many nodes each row gets of a batch's budget, i64 [rows]: the best of all rows.

    worth: each row's nodes', falling. A node worth `least` or less gets none: what a node costs in
    the plan's tokens. Ties go to the earlier row.
    """
    counts = np.asarray([len(row) for row in worth], np.int64)
    flat = np.concatenate([np.asarray(row, np.float64) for row in worth] or [np.zeros(0)])
    order = np.argsort(-flat, kind="stable")[: max(nodes, 0)]
    taken = order[flat[order] > least]
    spent: Array = np.bincount(
        np.repeat(np.arange(len(counts)), counts)[taken], minlength=len(counts)
    )
    return spent
