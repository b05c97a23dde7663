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

from collections.abc import Sequence

import numpy as np

from parlay.policies.types import Array


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

    Parents stand before children and are worth no less. Nodes worth 0 are dropped.
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


def spend(worth: Sequence[Array], nodes: int) -> Array:
    """Return how many nodes each row gets of a batch's budget, i64 [rows]: the best of all rows.

    worth: each row's nodes', falling, above 0. Ties go to the earlier row.
    """
    counts = np.asarray([len(row) for row in worth], np.int64)
    flat = np.concatenate([np.asarray(row, np.float64) for row in worth] or [np.zeros(0)])
    taken = np.argsort(-flat, kind="stable")[: max(nodes, 0)]
    spent: Array = np.bincount(
        np.repeat(np.arange(len(counts)), counts)[taken], minlength=len(counts)
    )
    return spent
