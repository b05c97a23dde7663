"""Acceptance over draft trees where the logits lie: `tree_verify` as batched tensor operations.

Every row walks a level at a time, those that have ended stay where they are, and no value is looked
at on the way: as many levels are walked as the deepest tree has. `device_verify` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parlay.engine.device_verify import (
    Drawn,
    accept_chains,
    drawn_at,
    keys_of,
    reject_chains,
    rejection_of,
    signed,
    tokens_of,
)
from parlay.engine.request import Request, SampleMode
from parlay.engine.sampling import Purpose, draw_keys, first_choices, race_by, uniforms
from parlay.engine.transfer import Sent, Upload
from parlay.engine.tree import Trees
from parlay.engine.verify import DraftLaw, Places, places_of
from parlay.policies.types import Array


@dataclass(slots=True)
class Walk:
    """Rows that walk: rows i64 [n] of those that emit, start i64 [n], each one's first place.

    child i64 [n, nodes + 1, C]: the nodes below the root, then below each node, -1 beyond them; and
    their tokens, beyond them the first one's again. coupled, sampled bool [n]; threshold f64 [n,
    1], inf where nothing is lossy. By level, [n, D]: uniform f64, and keys i64 of the token that a
    level draws: of a coupled row in place, of a sampled one where its walk ends. law: those rows of
    [n] whose laws are needed, and how they are shaped; None: nobody's.
    """

    rows: Sent
    start: Sent
    child: Sent
    token: Sent
    coupled: Sent
    sampled: Sent
    threshold: Sent
    uniform: Sent
    keys: Sent
    law: Drawn | None


@dataclass(slots=True)
class State:
    """How far each row has come: at i64 [n], its node, -1 the root; ended bool [n]; last i64 [n];
    path i64 [n, D]; rest float64 [laws, vocab]: what a sampled row's last token is drawn from.
    """  # noqa: D205

    at: Tensor
    ended: Tensor
    last: Tensor
    path: Tensor
    rest: Tensor | None = None


def walk_trees(
    logits: Tensor,
    requests: Sequence[Request],
    rows: Array,
    trees: Trees,
    law: DraftLaw | None,
    engine_seed: int,
    choice: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `tree_verify.accept_trees` does: accepted, tokens and path, on the device.

    choice i64 [places]: the first of the largest logits, where they are known.
    """
    places = places_of(rows, trees.padded_tokens(), trees.counts.astype(np.int32))
    straight = trees.straight()[rows]
    if straight.all():
        held, tokens = accept_chains(logits, requests, places, law, engine_seed, choice)
        place = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        return held, tokens, place.masked_fill(place >= held[:, None], -1)
    of = [requests[row] for row in rows.tolist()]
    known = {} if law is None else law.row
    drafted = [
        i for i, row in enumerate(rows.tolist())
        if row in known and of[i].sampling.mode is SampleMode.REJECTION
    ]  # fmt: skip
    assert straight[drafted].all(), "a sampled draft must be a chain: its law is of one path"
    load, depth = Upload(logits.device), int(trees.depth.max(initial=-1)) + 1
    chains = rejection_of(load, of, places, drafted, law, engine_seed, logits.shape[-1])
    others = np.setdiff1d(np.arange(len(rows)), drafted)
    walk = _layout(load, of, places, trees, others, depth, engine_seed, logits.shape[-1])
    load.send()

    tokens = torch.full((len(rows), depth + 1), -1, dtype=torch.int64, device=logits.device)
    path = tokens[:, :depth]
    if len(others):
        state = _walked(logits, walk, depth, choice)
        drafts = _tokens_on(state.path, walk)
        held = (state.path >= 0).sum(1)
        tokens = tokens.index_copy(0, walk.rows.tensor, tokens_of(drafts, held, state.last))
        path = path.index_copy(0, walk.rows.tensor, state.path)
    if chains is not None:
        held, last = reject_chains(logits, chains, law)
        mine = chains.chains.rows.tensor
        of_chain = tokens_of(chains.chains.draft.tensor, held, last)
        wide = torch.nn.functional.pad(of_chain, (0, depth + 1), value=-1)[:, : depth + 1]
        place = torch.arange(depth, device=logits.device)
        tokens = tokens.index_copy(0, mine, wide)
        path = path.index_copy(0, mine, place.masked_fill(place >= held[:, None], -1))
    return (path >= 0).sum(1), tokens, path


def _layout(
    load: Upload,
    requests: Sequence[Request],
    places: Places,
    trees: Trees,
    rows: Array,
    depth: int,
    engine_seed: int,
    vocab: int,
) -> Walk:
    """Lay out the walks of `rows`, indices of those that emit; requests are theirs all."""
    mine = [requests[i] for i in rows.tolist()]
    child, token = _children(trees, places.rows[rows])
    mode = [r.sampling.mode for r in mine]
    coupled = np.asarray([m is SampleMode.COUPLED for m in mode], bool)
    sampled = np.asarray([m is SampleMode.REJECTION for m in mode], bool)
    threshold = np.asarray([[r.speculation.lossy_threshold] for r in mine]).reshape(-1, 1)
    needing = np.flatnonzero(coupled | sampled | np.isfinite(threshold[:, 0]))
    # The lossy rule takes a greedy request's law at temperature 1.
    params = [
        s if (s := mine[i].sampling).temperature else replace(s, temperature=1.0)
        for i in needing.tolist()
    ]
    position = np.asarray([r.output_tokens for r in mine], np.int64)[:, None] + np.arange(depth + 1)
    keys = keys_of(mine, engine_seed)[:, None]
    last = np.where(
        coupled[:, None],
        draw_keys(keys, position, Purpose.COUPLED),
        draw_keys(keys, position, Purpose.RESIDUAL),
    )
    return Walk(
        load.add(rows),
        load.add(places.starts[rows]),
        load.add(child),
        load.add(token),
        load.add(coupled),
        load.add(sampled),
        load.add(threshold),
        load.add(uniforms(draw_keys(keys, position, Purpose.ACCEPT))),
        load.add(signed(last)),
        drawn_at(load, needing, params, vocab) if len(needing) else None,
    )


def _children(trees: Trees, rows: Array) -> tuple[Array, Array]:
    """Return the nodes below each node of batch rows, i64 [n, nodes + 1, C], and their tokens."""
    families: list[dict[int, list[int]]] = []
    for row in rows.tolist():
        below: dict[int, list[int]] = {}
        parents = trees.parent[trees.starts[row] : trees.starts[row + 1]].tolist()
        for node, parent in enumerate(parents):
            below.setdefault(parent, []).append(node)
        families.append(below)
    most = max((len(kids) for below in families for kids in below.values()), default=0)
    shape = len(rows), int(trees.counts[rows].max(initial=0)) + 1, max(most, 1)
    child, token = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    for i, (row, below) in enumerate(zip(rows.tolist(), families, strict=True)):
        mine = trees.tokens[trees.starts[row] : trees.starts[row + 1]]
        for node, kids in below.items():
            child[i, node + 1, : len(kids)] = kids
            token[i, node + 1], token[i, node + 1, : len(kids)] = mine[kids[0]], mine[kids]
    return child, token


def _walked(logits: Tensor, walk: Walk, depth: int, choice: Tensor | None) -> State:
    """Walk every row to its end."""
    rows, device = len(walk.start.tensor), logits.device
    nowhere = torch.full((rows,), -1, dtype=torch.int64, device=device)
    path = torch.full((rows, depth), -1, dtype=torch.int64, device=device)
    state = State(nowhere, torch.zeros(rows, dtype=torch.bool, device=device), nowhere, path)
    choice = first_choices(logits) if choice is None else choice
    for level in range(depth + 1):
        _level(logits, walk, state, level, choice)
    if state.rest is not None and walk.law is not None:
        of = walk.law.where.tensor
        ends = (state.path[of] >= 0).sum(1, keepdim=True)
        keys = walk.keys.tensor[of].gather(1, ends)[:, 0]
        drawn = race_by(state.rest, keys, torch.arange(logits.shape[-1], device=device))
        last = torch.where(walk.sampled.tensor[of], drawn, state.last[of])
        state.last = state.last.index_copy(0, of, last)
    return state


def _level(logits: Tensor, walk: Walk, state: State, level: int, choice: Tensor) -> None:
    """Move every row that has not ended to a child, or end it."""
    place = walk.start.tensor + 1 + state.at
    below = (state.at + 1)[:, None, None].expand(-1, 1, walk.child.tensor.shape[2])
    child, tokens = (t.tensor.gather(1, below)[:, 0] for t in (walk.child, walk.token))
    token, node = choice[place], torch.full_like(state.at, -1)
    law = None
    if walk.law is not None:
        of = walk.law.where.tensor
        law = Drawn(Sent(place[of]), walk.law.shape).laws(logits)
        raced = race_by(
            law, walk.keys.tensor[of, level], torch.arange(law.shape[-1], device=law.device)
        )
        coupled = walk.coupled.tensor[of]
        token = token.index_copy(0, of, torch.where(coupled, raced, token[of]))
    there = child >= 0
    node = _one(child, there & (tokens == token[:, None]))
    if law is not None and walk.law is not None:
        of = walk.law.where.tensor
        given = law.gather(1, tokens[of]).masked_fill(~there[of], 0.0)
        under = (given.cumsum(1) <= walk.uniform.tensor[of, level, None]) & there[of]
        # The first child whose share of [0, 1) holds the draw.
        first = torch.arange(child.shape[1], device=child.device) == under.sum(1, keepdim=True)
        drawn = _one(child[of], first & there[of])
        drawn = torch.where(walk.sampled.tensor[of], drawn, node[of])
        best = given.argmax(1, keepdim=True)
        enough = given.gather(1, best) >= walk.threshold.tensor[of]
        likely = child[of].gather(1, best).masked_fill(~enough, -1)[:, 0]
        node = node.index_copy(0, of, torch.where(drawn >= 0, drawn, likely))
        state.rest = _rest(law, tokens[of], there[of], state.rest, state.ended[of])
    goes = ~state.ended & (node >= 0)
    if level < state.path.shape[1]:
        state.path[:, level] = node.masked_fill(~goes, -1)
    state.last = torch.where(state.ended | goes, state.last, token)
    state.at = torch.where(goes, node, state.at)
    state.ended = state.ended | ~goes


def _one(child: Tensor, mark: Tensor) -> Tensor:
    """Return the child i64 [n] that is marked, of which there is at most one a row; -1: none."""
    return child.masked_fill(~mark, -1).amax(1)


def _rest(law: Tensor, tokens: Tensor, there: Tensor, rest: Tensor | None, ended: Tensor) -> Tensor:
    """Return what a row's last token is drawn from if it ends here: its law without its children.

    There need not be any left but by rounding; then any draw from the law is right. A row that has
    ended keeps what it has.
    """
    # Where a node has fewer children than others, its first stands in for those that it has not.
    keeps = (~there.any(1, keepdim=True)).to(law.dtype).expand_as(tokens)
    left = law * torch.ones_like(law).scatter(1, tokens, keeps)
    left = torch.where(left.sum(1, keepdim=True) > 0.0, left, law)
    return left if rest is None else torch.where(ended[:, None], rest, left)


def _tokens_on(path: Tensor, walk: Walk) -> Tensor:
    """Return the tokens i64 [n, D] of the nodes of a path, -1 beyond it."""
    child, token = walk.child.tensor.flatten(1), walk.token.tensor.flatten(1)
    nodes = walk.child.tensor.shape[1]
    by_node = torch.full((len(child), nodes), -1, dtype=torch.int64, device=child.device)
    # Who is nobody's child writes to the root's place, which no path names.
    by_node = by_node.scatter(1, child + 1, token)
    return by_node.gather(1, path + 1).masked_fill(path < 0, -1)
