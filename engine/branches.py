"""Side branches of drafted chains, where they are worth what verifying them costs. Free of torch.

A policy plans chains. What else might stand at a place of one, a second n-gram match or a drafter's
next-best token, becomes a branch; as many nodes as pay at the plan's own prices make a tree. Worth
is known before anything is sampled (`tree_shape`), and a chain's nodes are always all there, first
in their row, so that what a policy learns of chains is what it would learn without trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from parlay.engine.tree import MOST_NODES, Trees, trees_of
from parlay.engine.tree_shape import best_nodes, match_shares, spend
from parlay.policies.allocate import chances
from parlay.policies.types import NO_BUDGET, Array, Fitted, Plan

if TYPE_CHECKING:
    from parlay.engine.backend import Drafts
    from parlay.engine.proposers.ngram import Candidates


TREE_MS = 0.5
"""What a step with trees takes beside their nodes: masks, the walk, moving what holds. Measured on
one CPU core; most of it is Python."""


@dataclass(slots=True)
class Branch:
    """Tokens that may stand where the chain's token at `place` and those behind it do.

    share: P(the first of them is right, given that the chain's there is wrong).
    """

    place: int
    tokens: list[int]
    share: float


def least_worth(plan: Plan | None) -> float:
    """Return the chance of being accepted from which a node pays at the plan's prices.

    inf where it has none: then only chains are drafted.
    """
    if plan is None or not plan.token_value_ms > 0.0:
        return math.inf
    least = max(plan.marginal_token_price_ms / plan.token_value_ms, 0.0)
    return least if math.isfinite(least) else math.inf


def match_branches(found: Candidates, chain_token: int) -> list[Branch]:
    """Return the n-gram's continuations that do not begin as the chain does."""
    share = match_shares(found.match_tokens, found.match_count, found.guess_count)
    same = found.tokens[:, 0] == chain_token
    share /= max(1.0 - float(share[same].sum()), 1e-9)
    return [
        Branch(0, [t for t in found.tokens[i].tolist() if t >= 0], min(float(share[i]), 1.0))
        for i in np.flatnonzero(~same)
    ]


def trees_of_drafts(drafts: Drafts, fit: Fitted, plan: Plan | None, room: Array) -> Trees | None:
    """Return each row's first verify_k drafts and the branches that pay; None: chains are all.

    room i64 [rows]: nodes that a row's blocks hold. A chain's node j is its row's node j.
    """
    least = least_worth(plan)
    if plan is None or least == math.inf or not drafts.branches:
        return None
    k = np.minimum(fit.verify_k, drafts.count).tolist()
    estimate = _estimates(drafts, fit, plan).tolist()
    chains = [row[:n] for row, n in zip(drafts.tokens.tolist(), k, strict=True)]
    grown = {
        row: _grown(chains[row], branches, estimate[row], least)
        for row, branches in drafts.branches.items()
    }
    gain = sum(sum(value - least for value in tree[2][k[row] :]) for row, tree in grown.items())
    if gain * plan.token_value_ms <= TREE_MS:
        return None
    tokens: list[Sequence[int] | Array] = [*chains]
    parents: list[Sequence[int] | Array] = [range(-1, n - 1) for n in k]
    worth: list[Array] = [np.full(n, math.inf) for n in k]
    for row, tree in grown.items():
        if (nodes := min(int(room[row]), MOST_NODES)) > k[row]:
            tokens[row], parents[row], worth[row] = best_nodes(*tree, nodes)
    trees = trees_of(tokens, parents)
    if plan.budget_tokens != NO_BUDGET:
        trees = trees.first(spend(worth, max(plan.budget_tokens, sum(k))))
    return trees if len(trees.tokens) > sum(k) else None


def _estimates(drafts: Drafts, fit: Fitted, plan: Plan) -> Array:
    """Return P(the chain's token holds, given that those before do), [rows, K]; nan: not known.

    By the drafter's confidences where it has some, else by the plan's survival.
    """
    planned: Array = np.full(drafts.tokens.shape, np.nan)
    if fit.survival is not None:
        reach: Array = np.asarray(fit.survival, float)[:, : planned.shape[1]]
        before = np.concatenate([np.ones((len(reach), 1)), reach[:, :-1]], axis=1)
        step = np.divide(reach, before, out=np.zeros_like(reach), where=before > 0.0)
        planned[:, : reach.shape[1]] = np.minimum(step, 1.0)
    seen = chances(plan, fit.proposer, drafts.confidences)
    return np.where(np.isnan(seen), planned, seen)


def _grown(
    chain: list[int], branches: Sequence[Branch], estimate: list[float], least: float
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and worth of a chain, which is beyond price, and of what pays."""
    k = len(chain)
    tokens, parents, worth = list(chain), list(range(-1, k - 1)), [math.inf] * k
    known = set(zip(parents, tokens, strict=True))
    for branch in branches:
        if branch.place >= k:
            continue
        parent = branch.place - 1
        value = math.prod(estimate[: branch.place]) * (1.0 - estimate[branch.place]) * branch.share
        for place, token in enumerate(branch.tokens, branch.place):
            # From its second token on it lasts like the chain.
            value *= estimate[place] if place > branch.place else 1.0
            if not value > least or (parent, token) in known:
                break
            known.add((parent, token))
            parents.append(parent)
            parent = len(tokens)
            tokens.append(token)
            worth.append(value)
    return tokens, parents, worth
