"""Counts over the steps of a run: who drafted, how much, and what of it held, by task."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from parlay.engine.demo.prompts import TASKS
from parlay.policies.types import PROPOSERS, Array, PlanSource, StepOutcome, task_id

_TASK_IDS = np.asarray([task_id(t) for t in TASKS], np.uint32)
_ORDER = np.argsort(_TASK_IDS)


def _zeros() -> Array:
    return np.zeros((len(TASKS), PROPOSERS), np.int64)


@dataclass(slots=True)
class StepLog:
    """Sums over rows that decoded (the step that ends a prompt cannot draft, so it is left out).

    rows, k (tokens verified) and emitted (accepted + 1) i64 [tasks, proposers]; sources i64: rows
    by where their plan came from. timeline: for each step its ms, and rows and k by proposer.
    """

    rows: Array = field(default_factory=_zeros)
    k: Array = field(default_factory=_zeros)
    emitted: Array = field(default_factory=_zeros)
    sources: Array = field(default_factory=lambda: np.zeros(len(PlanSource), np.int64))
    timeline: list[tuple[float, Array, Array]] = field(default_factory=list)
    _started: set[int] = field(default_factory=set)

    def add(self, outcome: StepOutcome) -> None:
        """Count one step."""
        emits = outcome.emitted > 0
        started = np.asarray([int(r) in self._started for r in outcome.request_id], bool)
        self._started.update(int(r) for r in outcome.request_id[emits])
        at = emits & started
        task, proposer = _task_rows(outcome.task[at]), outcome.proposer[at]
        np.add.at(self.rows, (task, proposer), 1)
        np.add.at(self.k, (task, proposer), outcome.verified_k[at])
        np.add.at(self.emitted, (task, proposer), outcome.accepted[at] + 1)
        np.add.at(self.sources, outcome.plan_source[at], 1)
        rows = np.bincount(proposer, minlength=PROPOSERS)
        k = np.bincount(proposer, outcome.verified_k[at], minlength=PROPOSERS)
        self.timeline.append((outcome.step_ms, rows, k))

    def __add__(self, other: StepLog) -> StepLog:
        """Return the sums of both, this one's steps first."""
        return StepLog(
            self.rows + other.rows,
            self.k + other.k,
            self.emitted + other.emitted,
            self.sources + other.sources,
            self.timeline + other.timeline,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Return tokens a decoding row got from a step, the target's own among them."""
        return float(self.emitted.sum() / max(int(self.rows.sum()), 1))

    @property
    def share_by_proposer(self) -> Array:
        """Return [proposers]: which share of decoding rows each one drafted for."""
        return np.asarray(self.rows.sum(0) / max(int(self.rows.sum()), 1))

    @property
    def mean_k_by_task(self) -> Array:
        """Return [tasks]: tokens verified a row, rows without a draft among them; nan unseen."""
        rows = self.rows.sum(1)
        return np.where(rows > 0, self.k.sum(1) / np.maximum(rows, 1), np.nan)


def _task_rows(task: Array) -> Array:
    rows = _ORDER[np.searchsorted(_TASK_IDS[_ORDER], task)]
    assert (_TASK_IDS[rows] == task).all(), "a request without one of the demo's tasks"
    return rows
