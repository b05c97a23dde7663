"""Acceptance over draft trees: from the root, draw the target's token and follow the child it is.

Greedy and coupled: the target's token at a node is a function of its context, so the walk follows
the child that has it, as `verify` does along a chain.

Rejection: a node's children c1, c2, ... are deterministic, that is, functions of the committed text
(a drafter's top-b, n-gram matches). Each is a point mass, offered in turn without replacement: c1
is accepted with p(c1), else c2 with p(c2) / (1 - p(c1)) of the law that is left, and so on; if none
is, the token is drawn from p without them, renormalised (recursive rejection sampling: SpecInfer,
2305.09781; Sequoia, 2402.12374). Child c_i is thus the token with probability p(c_i), and any other
token x with (1 - sum p(c)) p(x) / (1 - sum p(c)) = p(x): each token of the walk has the target's
law, whatever the children, their order, number or estimates, as long as nothing of that was chosen
by the draw. One uniform number u serves all children of a node: given that u >= p(c1), (u - p(c1))
/ (1 - p(c1)) is uniform again, so c_i is accepted where u is below p(c1) + ... + p(c_i). Sampled
children would need their own laws, and a shape fixed before they are drawn: a sampled draft here is
a chain, under the law of `verify`.

Where a request asks for the lossy rule (`lossy.py`) and none of the children is followed, the
likeliest is, if it is likely enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.lossy import law_of, likeliest
from parlay.engine.request import Request, SampleMode
from parlay.engine.sampling import (
    Purpose,
    draw_key,
    first_choices,
    probabilities,
    race,
    request_key,
    uniform,
)
from parlay.engine.tree import Trees
from parlay.engine.verify import DraftLaw, Places, accept, places_of, reject
from parlay.policies.types import Array


@dataclass(slots=True)
class Walked:
    """What the target made of trees: accepted i32 [rows]; tokens i64 [rows, D + 1], the accepted
    ones and the target's own next, -1 beyond; path i64 [rows, D], the accepted nodes, -1 beyond.
    """  # noqa: D205

    accepted: Array
    tokens: Array
    path: Array


@dataclass(slots=True)
class _Row:
    """One row's walk: its first place, tree, key, and the nodes followed so far."""

    request: Request
    start: int
    tokens: list[int]
    parent: list[int]
    key: int
    path: list[int]
    last: int = -1

    @property
    def at(self) -> int:
        """Return the node that the walk stands on, -1 for the root."""
        return self.path[-1] if self.path else -1

    def children(self) -> list[int]:
        """Return the nodes below the one that the walk stands on."""
        at = self.at
        return [i for i in range(at + 1, len(self.parent)) if self.parent[i] == at]

    def draw_key(self, purpose: Purpose) -> int:
        """Return the key of a draw for the token that comes next."""
        return draw_key(self.key, self.request.output_tokens + len(self.path), purpose)


def accept_trees(
    logits: Tensor,
    requests: Sequence[Request],
    rows: Array,
    trees: Trees,
    law: DraftLaw | None,
    engine_seed: int,
) -> Walked:
    """Walk the trees of batch rows `rows`, those that emit; chains get what `accept` gives them.

    logits [places, vocab]: for each of `rows` one behind its last committed token, then one behind
    each node. requests and trees are the batch's. Rows with a law of their own must be chains.
    """
    places = places_of(rows, trees.padded_tokens(), trees.counts.astype(np.int32))
    straight = trees.straight()[rows]
    if straight.all():
        accepted, tokens = accept(logits, requests, places, law, engine_seed)
        place = np.arange(tokens.shape[1] - 1)
        return Walked(accepted, tokens, np.where(place < accepted[:, None], place, -1))
    depth = int(trees.depth.max(initial=-1)) + 1
    walked = Walked(
        np.zeros(len(rows), np.int32),
        np.full((len(rows), depth + 1), -1, np.int64),
        np.full((len(rows), depth), -1, np.int64),
    )
    sampled = [i for i, row in enumerate(rows) if _is_sampled(requests[row], int(row), law)]
    assert straight[sampled].all(), "a sampled draft must be a chain: its law is of one path"
    if sampled:
        reject(logits, requests, places, sampled, law, engine_seed, walked.accepted, walked.tokens)
        place = np.arange(depth)
        walked.path[sampled] = np.where(place < walked.accepted[sampled, None], place, -1)
    others = sorted(set(range(len(rows))) - set(sampled))
    found = [_row(requests, places, trees, i, engine_seed) for i in others]
    if any(_is_greedy(row) for row in found):
        choice = first_choices(logits).tolist()
        for row in filter(_is_greedy, found):
            while row.last < 0:
                at = row.start + 1 + row.at
                _follow(row, choice[at], logits[at : at + 1])
    _walk(logits, [row for row in found if row.last < 0])
    for i, row in zip(others, found, strict=True):
        held = walked.accepted[i] = len(row.path)
        walked.path[i, :held] = row.path
        walked.tokens[i, : held + 1] = [row.tokens[n] for n in row.path] + [row.last]
    return walked


def _is_greedy(row: _Row) -> bool:
    return row.request.sampling.mode is SampleMode.GREEDY


def _is_sampled(request: Request, row: int, law: DraftLaw | None) -> bool:
    return law is not None and row in law.row and request.sampling.mode is SampleMode.REJECTION


def _row(
    requests: Sequence[Request], places: Places, trees: Trees, index: int, engine_seed: int
) -> _Row:
    row = int(places.rows[index])
    mine = slice(trees.starts[row], trees.starts[row + 1])
    tokens, parent = trees.tokens[mine].tolist(), trees.parent[mine].tolist()
    key = request_key(requests[row], engine_seed)
    return _Row(requests[row], int(places.starts[index]), tokens, parent, key, [])


def _walk(logits: Tensor, rows: list[_Row]) -> None:
    """Move sampled rows a place further until each has its last token.

    Laws are only made of nodes that are reached: most are not.
    """
    while rows:
        where = torch.tensor([r.start + 1 + r.at for r in rows], device=logits.device)
        laws = probabilities(logits[where], [r.request.sampling for r in rows])
        _step_drawn(laws, rows)
        rows = [r for r in rows if r.last < 0]


def _follow(row: _Row, token: int, logits: Tensor | None = None) -> None:
    """Step to the child that is `token`, or end with it; logits [1, vocab]: of a greedy row.

    Where the row's request is lossy, a child that is likely enough comes before the end.
    """
    children = row.children()
    for node in children:
        if row.tokens[node] == token:
            row.path.append(node)
            return
    if logits is not None and row.request.speculation.lossy:
        node = _likeliest(law_of(logits, row.request)[0], row, children)
        if node >= 0:
            row.path.append(node)
            return
    row.last = token


def _step_drawn(p: Tensor, rows: list[_Row]) -> None:
    """Move sampled rows, whose target's laws here are p float64 [rows, vocab], by one token."""
    racing: list[int] = []
    keys: list[int] = []
    for i, row in enumerate(rows):
        if row.request.sampling.mode is SampleMode.COUPLED:
            racing.append(i)
            keys.append(row.draw_key(Purpose.COUPLED))
        elif (node := _offered(p[i], row)) >= 0:
            row.path.append(node)
        else:
            _leave_out(p[i], [row.tokens[n] for n in row.children()])
            racing.append(i)
            keys.append(row.draw_key(Purpose.RESIDUAL))
    if not racing:
        return
    ids = torch.arange(p.shape[-1], device=p.device)
    drawn = race(p[racing], keys, ids).tolist()
    for i, token in zip(racing, drawn, strict=True):
        if rows[i].request.sampling.mode is SampleMode.COUPLED:
            _follow(rows[i], token)
        else:
            rows[i].last = token


def _offered(p: Tensor, row: _Row) -> int:
    """Return the child that is accepted under the law p [vocab], -1 if none is."""
    children = row.children()
    if not children:
        return -1
    below = np.cumsum(p[[row.tokens[n] for n in children]].cpu().numpy())
    # The first child whose share of [0, 1) holds the draw.
    index = int(np.searchsorted(below, uniform(row.draw_key(Purpose.ACCEPT)), side="right"))
    return children[index] if index < len(children) else _likeliest(p, row, children)


def _likeliest(p: Tensor, row: _Row, children: list[int]) -> int:
    """Return the likeliest of the children, if the row's request is lossy enough for it, or -1."""
    best = likeliest(p, row.request, [row.tokens[n] for n in children])
    return children[best] if best >= 0 else -1


def _leave_out(p: Tensor, tokens: list[int]) -> None:
    """Take the refused tokens out of the law p [vocab], in place; it need not sum to 1."""
    if not tokens:
        return
    kept = p[tokens]
    p[tokens] = 0.0
    if float(p.sum()) <= 0.0:
        # The children had all the mass but for rounding; then any draw from p is right.
        p[tokens] = kept
