"""What a batch asks of the draft model, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parlay.engine.backend import Batch
from parlay.engine.branches import Branch
from parlay.engine.proposers.unread import Unread
from parlay.engine.request import Request
from parlay.engine.verify import DraftLaw
from parlay.policies.types import Array, Plan


@dataclass(slots=True)
class DraftRun:
    """What the draft model guessed for its rows: count i32 [rows], tokens i64 and confidences f32
    [rows, K], passes, the law of sampled drafts, and read i32 [rows], how many guesses the cache
    holds for good.

    caught_up: how many unread tokens were read of batch rows that still have some, and so drafted
    nothing; their `read` is -1. branches: what may stand beside the tokens of batch rows.
    unread: see `Guessed`.
    """  # noqa: D205

    count: Array
    tokens: Array
    confidences: Array
    passes: int
    law: DraftLaw
    read: Array
    caught_up: dict[int, int]
    branches: dict[int, list[Branch]]
    unread: Unread | None = None

    def watch(self, rows: Array, seen: Array) -> dict[int, list[int]]:
        """Return the guesses of batch rows rows[seen] to be matched, by row; nothing verifies them.

        The first laws of those that rejection sampling would verify go to `law.watched` instead.
        """
        guesses: dict[int, list[int]] = {}
        for i in np.flatnonzero(seen).tolist():
            row, count = int(rows[i]), int(self.count[i])
            place = self.law.row.pop(row, None)
            if count and place is None and row not in self.law.watched:
                guesses[row] = self.tokens[i, :count].tolist()
            elif count and place is not None:
                self.law.watched[row] = self.law.law[0][place]
        return guesses

    def only(self, rows: Array) -> DraftRun:
        """Return the run of some rows, bool or indices; passes and laws are everybody's."""
        return replace(
            self,
            count=self.count[rows],
            tokens=self.tokens[rows],
            confidences=self.confidences[rows],
            read=self.read[rows],
            unread=None if self.unread is None else self.unread.only(rows),
        )


@dataclass(slots=True)
class Work:
    """What a batch asks of the draft model, deepest rows first: order i64 [n], their batch rows;
    share i64, how many unread tokens of each are read; depth i64, how many are guessed; watched
    bool, who is only observed. read: see `Job`.
    """  # noqa: D205

    batch: Batch
    order: Array
    requests: list[Request]
    share: Array
    depth: Array
    watched: Array
    plan: Plan | None
    beside: int
    read: bool
