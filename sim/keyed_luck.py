"""The fast loop's luck where it is the engine's own: kept by request, drawn or recorded."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from parlay.policies.types import NGRAM, Array
from parlay.sim.backend import SimBackend
from parlay.sim.fast import FastLoop
from parlay.sim.workload import Arrival


class KeyedLuck:
    """Requests in order of arrival, a backend a batch, each with the luck that it has there.

    number i64 [rows]: the request in each row, 0 none; waiting: by batch, those without a row.
    """

    def __init__(self, backends: Sequence[SimBackend], rows: int) -> None:
        self.backends = backends
        self.names = tuple(backends[0].task_index)
        self.number, self.row = np.zeros(rows, np.int64), np.zeros(rows, np.intp)
        self.waiting: list[deque[tuple[int, Arrival]]] = [deque() for _ in backends]
        self.house = [0] * len(backends)
        self._numbers = [0] * len(backends)

    def arrive(self, batch: int, arrival: Arrival) -> int:
        """Let a request of a batch wait for a row; return its number, from 1."""
        self._numbers[batch] += 1
        self.house[batch] += 1
        self.waiting[batch].append((self._numbers[batch], arrival))
        return self._numbers[batch]

    def restart(self, loop: FastLoop, batches: Array, rows: Array) -> None:
        """Begin empty: requests come when they come."""

    def begin(self, loop: FastLoop, rows: Array) -> Array:
        """Give back the rows of requests that have ended, and hand rows to those that wait."""
        for row in rows[self.number[rows] > 0].tolist():
            batch = int(loop.batch[row])
            backend = self.backends[batch]
            backend.luck.release(backend.rows.pop(int(self.number[row])))
            self.number[row] = 0
            self.house[batch] -= 1
        taken: list[int] = []
        for batch, mine in self._parts(loop, rows):
            free = rows[mine].tolist()
            for row in free[: len(self.waiting[batch])]:
                number, arrival = self.waiting[batch].popleft()
                self._seat(loop, row, self.backends[batch], number, arrival)
                taken.append(row)
        return np.array(taken, np.intp)

    def _seat(
        self, loop: FastLoop, row: int, backend: SimBackend, number: int, arrival: Arrival
    ) -> None:
        task = backend.task_index[arrival.task]
        own = backend.luck.admit(number, task, arrival.output_tokens)
        backend.rows[number] = own
        self.number[row], self.row[row], loop.task[row] = number, own, task
        loop.prompt[row], loop.length[row] = arrival.prompt_tokens, arrival.output_tokens

    def leave(self, loop: FastLoop, batch: int) -> None:
        """Empty a batch that is over."""
        rows = np.flatnonzero(loop.batch == batch)
        self.waiting[batch].clear()
        loop.length[rows] = loop.output[rows] = loop.pending[rows] = 0

    def flip(self, loop: FastLoop) -> None:
        """Do nothing: coins belong to positions."""

    def held(self, loop: FastLoop, rows: Array, who: Array) -> Array:
        """Return how many of DEPTH tokens drafted now would hold."""
        out = np.zeros(len(rows), np.int64)
        for batch, mine in self._parts(loop, rows):
            at = rows[mine]
            luck = self.backends[batch].luck
            out[mine] = luck.held(self.row[at], loop.output[at], who[mine])
        return out

    def guessed(self, loop: FastLoop, rows: Array) -> Array:
        """Return how many of the n-gram's guesses would hold."""
        return self.held(loop, rows, np.full(len(rows), NGRAM))

    def offered(self, loop: FastLoop, rows: Array) -> Array:
        """Return how many tokens the n-gram could guess now."""
        out = np.zeros(len(rows), np.int64)
        for batch, mine in self._parts(loop, rows):
            at = rows[mine]
            out[mine] = self.backends[batch].luck.offered(self.row[at], loop.output[at], NGRAM)
        return out

    def move(self, loop: FastLoop, emitted: Array) -> None:
        """Do nothing: phases belong to positions."""

    def match(self, loop: FastLoop, decodes: Array) -> Array:
        """Return the n-gram's match lengths i32 [rows] at the positions of now."""
        out, rows = np.zeros(len(decodes), np.int32), np.flatnonzero(decodes)
        for batch, mine in self._parts(loop, rows):
            at = rows[mine]
            out[at] = self.backends[batch].luck.match[self.row[at], loop.output[at]]
        return out

    def _parts(self, loop: FastLoop, rows: Array) -> Iterator[tuple[int, slice]]:
        """Yield each batch that has any of rows, which ascend, and where they are."""
        edges = np.searchsorted(loop.batch[rows], np.arange(len(self.backends) + 1)).tolist()
        for batch, (start, stop) in enumerate(itertools.pairwise(edges)):
            if stop > start:
                yield batch, slice(start, stop)
