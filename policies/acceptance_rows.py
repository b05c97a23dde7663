"""Who has which row of the acceptance tables: requests and tasks, and what was counted of each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parlay.policies.types import PROPOSERS, Array

TASKS = 32
"""Rows of tasks; one more takes the row of the task that was asked for the longest ago."""
_FORGET_STEPS = 512


class Rows:
    """Requests and tasks by their rows; rows are made as they are asked for.

    request f64 [2, rows, PROPOSERS], task f64 [2, TASKS, PROPOSERS]: rejections and expected ones;
    others: as task, of other replicas; drafts f64 [TASKS, PROPOSERS]: how many task was counted
    from. task_of intp [rows]: a request's task; output i64 [rows]: its tokens. now: steps heard of.
    """

    def __init__(self) -> None:
        self.now = 0
        self.task, self.others = np.zeros((2, 2, TASKS, PROPOSERS))
        self.drafts = np.zeros((TASKS, PROPOSERS))
        self.request = np.zeros((2, 0, PROPOSERS))
        self.task_of = np.zeros(0, np.intp)
        self.output = np.zeros(0, np.int64)
        self._tasks: dict[int, int] = {0: 0}
        self._task_seen = np.zeros(TASKS, np.int64)
        self._row: dict[int, int] = {}
        self._free: list[int] = []
        self._seen = np.zeros(0, np.int64)
        # The rows of the batch that was asked for last: a step asks twice, and the next one again.
        self._asked: bytes | None = None
        self._found = np.zeros(0, np.intp)

    def of(self, request_id: Array, task: Array, output_tokens: Array | None = None) -> Array:
        """Return each request's row, making new ones.

        Less output than before is another request: an engine that restarts counts ids from 1 again.
        """
        asked = request_id.tobytes()
        if asked != self._asked:
            self._found, self._asked = self._look_up(request_id, task, output_tokens), asked
        found = self._found
        if output_tokens is not None and (behind := output_tokens < self.output[found]).any():
            for place in np.flatnonzero(behind).tolist():
                again = int(request_id[place])
                self._free.append(self._row.pop(again))
                found[place] = self._add(again, int(task[place]), int(output_tokens[place]))
        self._seen[found] = self.now
        return found

    def known(self, request_id: Array) -> Array:
        """Return each request's row, -1 where it has none."""
        return np.asarray([self._row.get(r, -1) for r in request_id.tolist()], np.intp)

    def _look_up(self, request_id: Array, task: Array, output_tokens: Array | None) -> Array:
        if self._asked is not None and len(request_id) == len(self._found):
            # Most requests stand where they stood.
            before = np.frombuffer(self._asked, request_id.dtype)
            found, moved = self._found.copy(), (request_id != before).nonzero()[0]
            found[moved] = self.known(request_id[moved])
        else:
            found = self.known(request_id)
        for place in np.flatnonzero(found < 0).tolist():
            start = 0 if output_tokens is None else int(output_tokens[place])
            found[place] = self._add(int(request_id[place]), int(task[place]), start)
        return found

    def _add(self, request_id: int, task: int, output_tokens: int) -> int:
        if not self._free:
            self._grow(max(64, len(self._seen)))
        row = self._free.pop()
        self._row[request_id] = row
        self.request[:, row] = 0.0
        self.task_of[row] = self.task_row(task)
        self.output[row] = output_tokens
        return row

    def _grow(self, more: int) -> None:
        size = len(self._seen)
        self.request = np.concatenate([self.request, np.zeros((2, more, PROPOSERS))], axis=1)
        self.task_of = np.concatenate([self.task_of, np.zeros(more, np.intp)])
        self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])
        self.output = np.concatenate([self.output, np.zeros(more, np.int64)])
        self._free.extend(range(size + more - 1, size - 1, -1))

    def task_row(self, task: int) -> int:
        """Return a task's row, making a new one."""
        row = self._tasks.get(task)
        if row is None:
            row = len(self._tasks)
            if row == TASKS:
                oldest = min(
                    (t for t in self._tasks if t),
                    key=lambda t: self._task_seen[self._tasks[t]],
                )
                row = self._tasks.pop(oldest)
                self.task[:, row] = self.others[:, row] = 0.0
                self.drafts[row] = 0.0
            self._tasks[task] = row
        self._task_seen[row] = self.now
        return row

    def forget(self) -> None:
        """Free the rows of requests that were not asked for in the last _FORGET_STEPS steps."""
        gone = [r for r, row in self._row.items() if self.now - self._seen[row] > _FORGET_STEPS]
        for request_id in gone:
            self._free.append(self._row.pop(request_id))
        if gone:
            self._asked = None

    @property
    def in_all(self) -> Array:
        """Return f64 [2, TASKS, PROPOSERS]: what is counted of tasks here and by others."""
        return self.task + self.others

    @property
    def task_id(self) -> Array:
        """Return u32 [tasks]: the tasks that have rows, in the order of `tasks`."""
        return np.fromiter(self._tasks, np.uint32, len(self._tasks))

    @property
    def tasks(self) -> Array:
        """Return intp [tasks]: the row of each task."""
        return np.fromiter(self._tasks.values(), np.intp, len(self._tasks))

    def take_tasks(self, task_id: Array, counts: Array) -> None:
        """Go on from f64 [2, tasks, PROPOSERS] of tasks that have rows."""
        self.task[:, [self._tasks[t] for t in task_id.tolist()]] = counts

    def take_others(self, task_id: Array, counts: Array) -> None:
        """Take what others counted, f64 [2, tasks, PROPOSERS], as far as there are rows."""
        self.others[:] = 0.0
        for place, task in enumerate(task_id.tolist()):
            if task not in self._tasks and len(self._tasks) < TASKS:
                self.task_row(task)
            if task in self._tasks:
                self.others[:, self._tasks[task]] = counts[:, place]

    def state(self) -> dict[str, Array]:
        """Return everything but what others counted; tasks by their order."""
        rows, tasks = np.fromiter(self._row.values(), np.intp, len(self._row)), self.tasks
        return {
            "task_id": self.task_id,
            "task_seen": self._task_seen[tasks],
            "task_counts": self.task[:, tasks],
            "request_id": np.fromiter(self._row, np.uint64, len(rows)),
            "request_counts": self.request[:, rows],
            "request_task": np.argsort(tasks)[self.task_of[rows]],
            "request_seen": self._seen[rows],
            "request_output": self.output[rows],
        }

    def load(self, state: Mapping[str, Array], now: int) -> None:
        """Take a state from `state()` into rows that are new."""
        self.now = now
        self._tasks = {int(t): row for row, t in enumerate(state["task_id"])}
        self.task[:, : len(self._tasks)] = state["task_counts"]
        for place, request_id in enumerate(state["request_id"].tolist()):
            row = self._add(int(request_id), 0, int(state["request_output"][place]))
            self.request[:, row] = state["request_counts"][:, place]
            self.task_of[row] = state["request_task"][place]
            self._seen[row] = state["request_seen"][place]
        self._task_seen[: len(self._tasks)] = state["task_seen"]
