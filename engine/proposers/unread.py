"""Guesses that go from their drafter to the target without being read by the host on the way.

How many there are the host knows where no rule asks for their confidences. Their values feed the
target's pass on the device, and come back with its verdict: a step's one look at a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Drafts
from parlay.engine.branches import Branch
from parlay.engine.transfer import upload
from parlay.policies.types import Array


@dataclass(slots=True)
class Unread:
    """tokens i64 [n] and peaks f32 [n], what `Guessed` says of them, on the drafter's device; where
    i64 [rows, K]: which of them a place of a run's row is, -1: none.
    """  # noqa: D205

    tokens: Tensor
    peaks: Tensor
    where: Array

    def only(self, rows: Array) -> Unread:
        """Return the guesses of some of the run's rows, bool or indices."""
        return Unread(self.tokens, self.peaks, self.where[rows])


class Run(Protocol):
    """What a drafter made for some rows of a batch."""

    count: Array
    tokens: Array
    confidences: Array
    branches: dict[int, list[Branch]]
    unread: Unread | None

    def watch(self, rows: Array, seen: Array) -> dict[int, list[int]]:
        """Return the guesses of batch rows rows[seen], by row; nothing verifies them."""
        ...

    def only(self, rows: Array) -> Self:
        """Return the run of some rows."""
        ...


@dataclass(slots=True)
class Late:
    """A run for batch rows, of which those `seen`, bool, are only observed and go to `watched`."""

    rows: Array
    run: Run
    seen: Array
    watched: dict[int, list[int]]

    @property
    def verified(self) -> tuple[Array, Unread]:
        """Return the batch rows that are verified, and what is unread of them."""
        assert self.run.unread is not None
        return self.rows[~self.seen], self.run.unread.only(~self.seen)


def take(drafts: Drafts, run: Run, rows: Array, k: Array, watched: dict[int, list[int]]) -> None:
    """Put a run for batch rows into a step's drafts, but into `watched` what is only observed, k
    i32 [batch rows] tokens of each row, or [0].
    """  # noqa: D205
    seen = k[rows] > 0 if len(k) else np.zeros(len(rows), bool)
    late = Late(rows, run, seen, watched)
    if run.unread is not None:
        drafts.unread.append(late)
    _fill(drafts, late)


def settle(drafts: Drafts, told: Sequence[Array]) -> None:
    """Put in what was unread; told: the arrays of `values`."""
    for late, tokens, peaks in zip(drafts.unread, told[::2], told[1::2], strict=True):
        assert late.run.unread is not None
        there = late.run.unread.where >= 0
        at = late.run.unread.where[there]
        late.run.tokens[there], late.run.confidences[there] = tokens[at], peaks[at]
        _fill(drafts, late)


def _fill(drafts: Drafts, late: Late) -> None:
    """Copy what a run says; what stands beside rows that are only observed is dropped."""
    late.watched.update(late.run.watch(late.rows, late.seen))
    rows, run = late.rows[~late.seen], late.run.only(~late.seen)
    depth = min(run.tokens.shape[1], drafts.tokens.shape[1])
    drafts.count[rows], drafts.tokens[rows, :depth] = run.count, run.tokens[:, :depth]
    drafts.confidences[rows, :depth] = run.confidences[:, :depth]
    mine = set(rows.tolist())
    drafts.branches |= {row: found for row, found in run.branches.items() if row in mine}


def put_into(
    ids: Array, unread: Sequence[Late], ends: Array, k: Array, device: torch.device
) -> Array | Tensor:
    """Return a pass's tokens ids i64 [tokens]: where something is unread on a device, with that.

    ends, k i64 [batch rows]: behind a row's last token in the pass, and how many drafts it ends in.
    """
    if not unread:
        return ids
    none = np.zeros(0, np.int64)
    at, source, tokens, first = [none], [none], list[Tensor](), 0
    for late in unread:
        rows, guesses = late.verified
        for row, where in zip(rows.tolist(), guesses.where, strict=True):
            at.append(np.arange(ends[row] - k[row], ends[row]))
            source.append(first + where[: k[row]])
        tokens.append(guesses.tokens.to(device, non_blocking=True))
        first += len(guesses.tokens)
    fed, into, of = upload(device, ids, np.concatenate(at), np.concatenate(source))
    return fed.index_copy(0, into, torch.cat(tokens)[of])


def values(unread: Sequence[Late], device: torch.device) -> list[Tensor]:
    """Return what is to be read, on a device: each run's tokens, then its peaks."""
    runs = [late.run.unread for late in unread]
    both = [t for u in runs if u is not None for t in (u.tokens, u.peaks)]
    return [t.to(device, non_blocking=True) for t in both]
