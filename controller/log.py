"""The sidecar's decision log: steps go on a queue, a thread of its own makes them rows and files.

Whoever decides never waits for it: a queue that is full loses its oldest step, and what cannot be
written is lost, counted, and said once in the process's own log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from parlay.controller.heard import HeardStep, heard_rows
from parlay.policies.decision_log import DecisionLog, LogSettings

QUEUE_STEPS = 512
IDLE_S = 2.0
"""After so long without a step, what is held is written."""
DEFER_S = 0.002
"""A step is worked on so long after it came: the plan that answers it is made and sent first."""
YIELD_S = 0.0005
RETRY_S = 1.0
CLOSE_S = 5.0
"""How long `close` waits for a disk at most."""
log = logging.getLogger("parlay.controller")


@dataclass(slots=True)
class LogCounts:
    """What became of steps, and how often a file could not be written; its rows are lost too."""

    taken_steps: int = 0
    dropped_steps: int = 0
    unusable_steps: int = 0
    failed_writes: int = 0


class StepLog:
    """Writes heard steps into a folder, until closed; one writer a folder.

    policy: names plans that carry no version. Raises OSError where the folder cannot be written or
    another process writes it, ValueError where pyarrow is missing or a foreign file is in the way.
    """

    def __init__(
        self,
        folder: Path,
        policy: str,
        settings: LogSettings | None = None,
        idle_s: float = IDLE_S,
        queue_steps: int = QUEUE_STEPS,
    ) -> None:
        self.counts = LogCounts()
        self._folder, self._policy, self._idle_s = folder, policy, idle_s
        self._lock = _claim(folder)
        try:
            self._log = DecisionLog(folder, settings)
        except BaseException:
            os.close(self._lock)
            raise
        self._steps: deque[HeardStep] = deque()
        self._most, self._closing = queue_steps, False
        self._ready = threading.Condition()
        self._last, self._held = ("", -1), False
        self._failing, self._failed_s = False, 0.0
        self._thread = threading.Thread(target=self._work, name="parlay-log", daemon=True)
        self._thread.start()

    @property
    def waiting_steps(self) -> int:
        """Return how many steps wait to be written."""
        return len(self._steps)

    def put(self, step: HeardStep) -> None:
        """Take a step; never waits for the disk."""
        with self._ready:
            if len(self._steps) >= self._most:
                self._steps.popleft()
                self.counts.dropped_steps += 1
            self.counts.taken_steps += 1
            self._steps.append(step)
            if len(self._steps) == 1:
                self._ready.notify()

    def sample(self, share: float) -> None:
        """Keep this share of the requests from now on."""
        # Replaced whole: the thread that writes reads it without a lock.
        self._log.settings = dataclasses.replace(self._log.settings, sample_rate=share)

    def close(self) -> None:
        """Write what was taken, for a few seconds at most, and say what is missing in the log."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("decision log folder=%s: the disk is silent, its end is lost", self._folder)
            return
        os.close(self._lock)
        lost = self.counts
        if lost.dropped_steps or lost.unusable_steps or lost.failed_writes:
            log.warning(
                "decision log has gaps folder=%s dropped_steps=%d unusable_steps=%d"
                " failed_writes=%d",
                *(self._folder, lost.dropped_steps, lost.unusable_steps, lost.failed_writes),
            )

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next(self) -> HeardStep | None:
        """Return the next step; None: none came for a while, or none will."""
        with self._ready:
            if not self._steps and not self._closing:
                self._ready.wait_for(lambda: self._steps or self._closing, self._idle_s)
                self._ready.wait_for(lambda: self._closing, DEFER_S if self._steps else 0.0)
            return self._steps.popleft() if self._steps else None

    def _work(self) -> None:
        while True:
            step = self._next()
            self._write(step)
            if step is None and self._closing and not self._steps:
                return
            # Lets go of the interpreter for long enough that whoever waits to decide gets it.
            time.sleep(YIELD_S)

    def _write(self, step: HeardStep | None) -> None:
        if step is not None:
            self._append(step)
        if step is None or (self._failing and time.monotonic() - self._failed_s >= RETRY_S):
            self._flush()

    def _append(self, step: HeardStep) -> None:
        try:
            columns = heard_rows(step, self._policy)
        except Exception as error:
            if not self.counts.unusable_steps:
                log.warning("decision log: step left out error=%r", str(error))
            self.counts.unusable_steps += 1
            return
        which = (step.engine, step.view.step_id)
        if which == self._last:
            # A run that begins again is another step: within a file the two would be read as one.
            self._flush()
        self._last, self._held = which, True
        try:
            self._log.append(columns)
        except Exception as error:
            self._fail(error)

    def _flush(self) -> None:
        if not self._held:
            return
        try:
            self._log.flush()
        except Exception as error:
            self._fail(error)
            return
        self._held = False
        if self._failing:
            self._failing = False
            log.warning("decision log is written again folder=%s", self._folder)

    def _fail(self, error: Exception) -> None:
        """Count a file that could not be written; the first of a row is said, all are tried again.

        A folder that was removed is made anew.
        """
        if not self._failing:
            log.warning(
                "decision log cannot be written, decisions go on folder=%s error=%r",
                *(self._folder, str(error)),
            )
        self.counts.failed_writes += 1
        self._failing, self._failed_s, self._held = True, time.monotonic(), False
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)


def _claim(folder: Path) -> int:
    """Make the folder, see that a file can be written, and lock it; return what holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise OSError(f"cannot write the decision log into {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise OSError(
            f"cannot write the decision log into {folder}: another process does"
        ) from None
    return lock


def is_written(folder: Path) -> bool:
    """Say whether a process holds the folder to write a log into it."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
