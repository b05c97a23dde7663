"""Drafting where the drafter's logits lie: each place's tokens feed the next without being read.

Where nothing but the target's pass wants to know what was guessed, it is not read at all (see
`unread.py`); else one copy brings it back at the end. Only a stop rule has to be asked at every
place: then there is one small copy a place. On a CPU the proposers' own loops are quicker; tests
hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parlay.engine.branches import Branch
from parlay.engine.proposers.confidence import choice_and_peak, entropy_of, estimate, keeps
from parlay.engine.proposers.unread import Unread
from parlay.engine.request import Request
from parlay.engine.sampling import laws, race_by, shaping
from parlay.engine.transfer import Reading, Upload, upload
from parlay.policies.types import Array, Plan, Proposer, StopKind, StopRule


@dataclass(slots=True)
class Said:
    """Logits [n, ids] of a place, and where they were found `choice_and_peak` of them.

    They hold until the drafter is asked for the next place.
    """

    logits: Tensor
    after: tuple[Tensor, ...] = ()


class Drafter(Protocol):
    """What guesses a place at a time."""

    def first(self, alive: Array) -> Said:
        """Return what the first place of rows alive i64 may hold."""
        ...

    def deeper(self, alive: Array, kept: Tensor | None, tokens: Tensor, place: int) -> Said:
        """Return what the next place of rows alive i64 [n] may hold; tokens i64 [n]: theirs at
        `place`. kept i64 [n]: which of the rows before they are; None: all of those.
        """  # noqa: D205
        ...


@dataclass(slots=True)
class Job:
    """What is to be guessed, by row: order i64, its row of the batch; depth i64, tokens; watched
    bool, whom no rule stops; drawn bool, whose tokens are a race's under keys u64 [rows, K]; wide
    bool, who gets branches, `beside` of them a place. ids i64 [n]: the token of an entry of a law.
    read: whether the host has to know what was guessed before it is verified.
    """  # noqa: D205

    proposer: Proposer
    requests: Sequence[Request]
    order: Array
    ids: Tensor
    depth: Array
    watched: Array
    drawn: Array
    keys: Array
    wide: Array
    beside: int
    plan: Plan | None
    read: bool


@dataclass(slots=True)
class Guessed:
    """tokens i64 [rows, K], -1 beyond each row's, confidences f32 [rows, K], nan beyond, and how
    many places were guessed. laws: by place, float64 [rows, n], what was drawn from. branches: what
    may stand beside the tokens of batch rows. unread: what tokens, 0 so far, and confidences will
    be once it has been read; None: they are what they are.
    """  # noqa: D205

    tokens: Array
    confidences: Array
    passes: int = 1
    laws: list[Tensor] = field(default_factory=list)
    branches: dict[int, list[Branch]] = field(default_factory=dict)
    unread: Unread | None = None


@dataclass(slots=True)
class _Place:
    """What one place gave: rows i64 [n], those of them that keep their token bool [n], and on the
    device tokens i64, peak f32 [n]; of batch rows wide i64 [m] the tokens beside and their shares,
    [m, b] both.
    """  # noqa: D205

    rows: Array
    keep: Array
    tokens: Tensor
    peak: Tensor
    wide: Array
    beside: list[Tensor]


def guess_on_device(drafter: Drafter, job: Job, keep_laws: bool) -> Guessed:
    """Guess up to depth[row] tokens of every row; at least one row's depth is not 0.

    keep_laws: whether what tokens were drawn from is asked for.
    """
    most = int(job.depth.max())
    shape = len(job.depth), most
    guessed = Guessed(np.full(shape, -1, np.int64), np.full(shape, np.nan, np.float32))
    stop = job.plan.stop_rule if job.plan else StopRule()
    reach, alive = np.ones(len(job.depth)), np.flatnonzero(job.depth)
    said, places = drafter.first(alive), list[_Place]()
    while True:
        place = len(places)
        found, own = _place(said, job, alive, place, guessed.laws if keep_laws else None)
        places.append(found)
        go = job.depth[alive] > place + 1
        if stop.kind is not StopKind.NONE:
            found.keep, lasts = _asked(stop, job, place, said, found, own, reach)
            go &= lasts
        if not go.any():
            break
        kept = None if go.all() else upload(job.ids.device, np.flatnonzero(go))[0]
        alive = alive[go]
        tokens = found.tokens if kept is None else found.tokens[kept]
        said = drafter.deeper(alive, kept, tokens, place)
    guessed.passes = len(places)
    if job.read or job.beside or stop.kind is not StopKind.NONE:
        _read(places, guessed)
    else:
        _leave(places, guessed)
    return guessed


def _place(
    said: Said, job: Job, alive: Array, place: int, kept_laws: list[Tensor] | None
) -> tuple[_Place, Tensor]:
    """Choose the tokens of one place; return them, and their own chance f32 [n]."""
    load, drawn = Upload(job.ids.device), np.flatnonzero(job.drawn[alive])
    wide = np.flatnonzero(job.wide[alive]) if job.beside else np.zeros(0, np.int64)
    at, at_rows, at_wide = (load.add(a) for a in (drawn, alive[drawn], wide))
    keys = load.add(job.keys[alive[drawn], place].view(np.int64))
    params = [job.requests[row].sampling for row in alive[drawn].tolist()]
    shape = [load.add(a) for a in shaping(params, said.logits.shape[-1])]
    load.send()
    # A graph's next replay writes over what this one left.
    choice, peak = (t.clone() for t in said.after) if said.after else choice_and_peak(said.logits)
    if len(drawn):
        q = laws(said.logits[at.tensor], *(s.tensor for s in shape))
        choice = choice.index_copy(0, at.tensor, race_by(q, keys.tensor, job.ids))
        if kept_laws is not None:
            whole = q.new_zeros(len(job.depth), q.shape[-1])
            kept_laws.append(whole.index_copy(0, at_rows.tensor, q))
    p = torch.softmax(said.logits.float(), -1) if len(drawn) or len(wide) else None
    own = peak if p is None else p.gather(1, choice[:, None])[:, 0]
    beside = []
    if p is not None and len(wide):
        beside = _beside(p[at_wide.tensor], choice[at_wide.tensor], job)
    keep = np.ones(len(alive), bool)
    return _Place(alive, keep, job.ids[choice], peak, job.order[alive[wide]], beside), own


def _beside(p: Tensor, choice: Tensor, job: Job) -> list[Tensor]:
    """Return the next-best tokens i64 [m, b] of laws p, and their shares of what is left of it."""
    left = (1.0 - p.gather(1, choice[:, None])).clamp_min(1e-9)
    others = p.scatter(1, choice[:, None], 0.0).topk(min(job.beside, p.shape[1] - 1))
    return [job.ids[others.indices], others.values / left]


def _asked(
    stop: StopRule, job: Job, place: int, said: Said, found: _Place, own: Tensor, reach: Array
) -> tuple[Array, Array]:
    """Ask the stop rule: return who keeps this place's token, and who may go on, bool [n] both.

    reach [rows]: P(accepted up to here), which this place takes part in.
    """
    asked = [found.peak, own]
    if stop.kind is StopKind.ENTROPY:
        asked.append(entropy_of(said.logits))
    peak, chance, *rest = (a.astype(np.float32) for a in Reading(asked).arrays())
    reach[found.rows] *= estimate(job.plan, job.proposer, place, peak)
    watched = job.watched[found.rows]
    keep = keeps(stop, reach[found.rows], rest[0] if rest else peak, place) | watched
    if stop.kind is StopKind.PROBABILITY:
        # The token that falls below the threshold is kept; drafting ends behind it.
        return keep, keep & ((chance >= stop.threshold) | watched)
    return keep, keep


def _leave(places: Sequence[_Place], guessed: Guessed) -> None:
    """Say where all that the places gave can be read: every row kept every token."""
    where, first = np.full(guessed.tokens.shape, -1, np.int64), 0
    for place, found in enumerate(places):
        where[found.rows, place] = first + np.arange(len(found.rows))
        first += len(found.rows)
    guessed.tokens[where >= 0] = 0
    tokens, peaks = (torch.cat(t) for t in zip(*((p.tokens, p.peak) for p in places), strict=True))
    guessed.unread = Unread(tokens, peaks, where)


def _read(places: Sequence[_Place], guessed: Guessed) -> None:
    """Bring back what all places gave, at once."""
    flat = [t for p in places for t in (p.tokens, p.peak, *p.beside)]
    parts = iter(Reading(flat).arrays())
    for place, found in enumerate(places):
        tokens, peak = next(parts), next(parts)
        guessed.confidences[found.rows, place] = peak
        guessed.tokens[found.rows[found.keep], place] = tokens[found.keep]
        if found.beside:
            others, shares = next(parts).tolist(), next(parts).tolist()
            for row, *both in zip(found.wide.tolist(), others, shares, strict=True):
                mine = guessed.branches.setdefault(row, [])
                mine += [Branch(place, [t], s) for t, s in zip(*both, strict=True)]
