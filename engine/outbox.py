"""Reports on their way to the sidecar: the newest of them, should it be behind or gone."""

from __future__ import annotations

import contextlib
import queue
from dataclasses import dataclass

from parlay.policies.types import BatchView, StepOutcome

QUEUE_REPORTS = 64


@dataclass(slots=True)
class Report:
    """One step on its way out: its run of step ids, what ended, what starts."""

    run: int
    outcome: StepOutcome | None
    view: BatchView | None


class Outbox:
    """A queue that never makes who puts wait: a full one loses its oldest report.

    One thread puts reports; any may `wake` whoever gets them, who then looks up from waiting.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Report | None] = queue.SimpleQueue()

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, report: Report) -> int:
        """Take a report; return how many were lost for it. What wakes the getter is kept."""
        lost, woken = 0, False
        while len(self) >= QUEUE_REPORTS:
            with contextlib.suppress(queue.Empty):
                oldest = self._queue.get_nowait()
                woken |= oldest is None
                lost += oldest is not None
        if woken:
            self.wake()
        self._queue.put(report)
        return lost

    def get(self) -> Report | None:
        """Wait for the next report; None: somebody called `wake`."""
        return self._queue.get()

    def wake(self) -> None:
        """Let whoever waits for a report look up."""
        self._queue.put(None)
