"""Sums over what one engine decided and did; pure, structs of arrays, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import numpy as np

from parlay.policies.allocate import ngram_survival
from parlay.policies.types import (
    NGRAM,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    PlanSource,
    Reason,
    StepOutcome,
    match_bucket,
)

POSITIONS = 16
"""Draft positions told apart; deeper ones are counted nowhere."""
AGE_EDGES = (0, 1, 2, 3, 4, 8, 16, 32)
"""Upper edges, in steps, of the ages of plans; the last bucket holds what is older."""
DECIDE_EDGES_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
"""Upper edges of the time that a decision takes."""
BINS = 10
"""Bins of a predicted chance of acceptance, by which its calibration is judged."""
TASK_ROWS, TASK_DRAFTED, TASK_ACCEPTED, TASK_EMITTED = range(4)
_REASONS, _SOURCES = len(Reason), len(PlanSource)


def _zeros(*shape: int) -> Callable[[], Array]:
    return partial(np.zeros, shape)


@dataclass(slots=True)
class Tally:
    """Sums, f64.

    decisions [PROPOSERS, reasons]: planned rows that decode. planned_k [PROPOSERS]: tokens they
    were to draft. decide_s [edges + 1]: decisions by the time they took. steps, step_ms, emitted,
    drafted_rows: [1] each. sources [sources]: rows by whose plan they followed. ages [edges + 1]:
    rows by how many steps old the sidecar's plan was, age_steps [1] their sum. reached, held
    [PROPOSERS, POSITIONS]: drafted positions that verification reached, and those accepted. bins
    [PROPOSERS, BINS, 3]: predicted and actual acceptances, and places, by what was predicted.
    """

    decisions: Array = field(default_factory=_zeros(PROPOSERS, _REASONS))
    planned_k: Array = field(default_factory=_zeros(PROPOSERS))
    decide_s: Array = field(default_factory=_zeros(len(DECIDE_EDGES_S) + 1))
    decide_sum_s: Array = field(default_factory=_zeros(1))
    steps: Array = field(default_factory=_zeros(1))
    step_ms: Array = field(default_factory=_zeros(1))
    emitted: Array = field(default_factory=_zeros(1))
    rows: Array = field(default_factory=_zeros(PROPOSERS))
    sources: Array = field(default_factory=_zeros(_SOURCES))
    ages: Array = field(default_factory=_zeros(len(AGE_EDGES) + 1))
    age_steps: Array = field(default_factory=_zeros(1))
    reached: Array = field(default_factory=_zeros(PROPOSERS, POSITIONS))
    held: Array = field(default_factory=_zeros(PROPOSERS, POSITIONS))
    bins: Array = field(default_factory=_zeros(PROPOSERS, BINS, 3))
    tasks: dict[int, Array] = field(default_factory=dict)

    def add(self, other: Tally, keep: float = 1.0, most_tasks: int = 32) -> None:
        """Add another's sums to `keep` times these; of too many tasks the smallest are let go.

        tasks: by task id, f64 [4, PROPOSERS]: rows, drafted, accepted, emitted.
        """
        for name in _ARRAYS:
            array = getattr(self, name)
            array *= keep
            array += getattr(other, name)
        for sums in self.tasks.values():
            sums *= keep
        for task, sums in other.tasks.items():
            self.tasks[task] = self.tasks.get(task, 0.0) + sums
        if len(self.tasks) > most_tasks:
            by_rows = sorted(self.tasks, key=lambda t: -float(self.tasks[t][TASK_ROWS].sum()))
            self.tasks = {task: self.tasks[task] for task in by_rows[:most_tasks]}


_ARRAYS = [f.name for f in fields(Tally) if f.name != "tasks"]


def tally_of(
    decided: Sequence[tuple[BatchView, Plan, float]],
    outcomes: Sequence[StepOutcome],
    plans: dict[int, Plan],
) -> Tally:
    """Return the sums over decisions (view, plan, seconds it took) and outcomes.

    plans: by step id, those that the outcomes may have followed.
    """
    tally = Tally()
    if decided:
        _add_decisions(tally, decided)
    if outcomes:
        _add_outcomes(tally, outcomes)
        _add_calibration(tally, outcomes, plans)
    return tally


def _add_decisions(tally: Tally, decided: Sequence[tuple[BatchView, Plan, float]]) -> None:
    plans = [plan for _, plan, _ in decided]
    decodes = _joined([view.prefill_tokens for view, _, _ in decided]) == 0
    proposer = _joined([p.proposer for p in plans])[decodes].astype(np.intp)
    k = _joined([p.k for p in plans])[decodes]
    reason = np.minimum(_joined([p.reason for p in plans])[decodes], _REASONS - 1)
    proposer = np.where((k > 0) & (proposer < PROPOSERS), proposer, 0)
    cells = np.bincount(proposer * _REASONS + reason, minlength=PROPOSERS * _REASONS)
    tally.decisions += cells.reshape(PROPOSERS, _REASONS)
    tally.planned_k += np.bincount(proposer, k, minlength=PROPOSERS)
    seconds = np.array([took_s for _, _, took_s in decided])
    bucket = np.searchsorted(DECIDE_EDGES_S, seconds)
    tally.decide_s += np.bincount(bucket, minlength=len(tally.decide_s))
    tally.decide_sum_s += seconds.sum()


def _add_outcomes(tally: Tally, outcomes: Sequence[StepOutcome]) -> None:
    tally.steps += len(outcomes)
    times = np.array([o.step_ms for o in outcomes], float)
    tally.step_ms += times[np.isfinite(times) & (times > 0.0)].sum()
    rows = np.array([len(o) for o in outcomes])
    emitted = _joined([o.emitted for o in outcomes]).astype(float)
    tally.emitted += emitted.sum()
    source = np.minimum(_joined([o.plan_source for o in outcomes]), _SOURCES - 1)
    tally.sources += np.bincount(source, minlength=_SOURCES)
    step = np.repeat(np.array([o.step_id for o in outcomes]), rows)
    followed = _joined([o.plan_step_id for o in outcomes]).astype(np.int64)
    age = (step - followed)[source == PlanSource.REMOTE]
    age = age[age >= 0]
    tally.ages += np.bincount(np.searchsorted(AGE_EDGES, age), minlength=len(tally.ages))
    tally.age_steps += age.sum()
    proposer = np.minimum(_joined([o.proposer for o in outcomes]).astype(np.intp), PROPOSERS - 1)
    tally.rows += np.bincount(proposer[emitted > 0], minlength=PROPOSERS)
    accepted = _joined([o.accepted for o in outcomes])
    verified = _joined([o.verified_k for o in outcomes])
    tally.reached += _beyond(proposer, np.minimum(accepted + 1, verified))
    tally.held += _beyond(proposer, np.minimum(accepted, verified))
    task = _joined([o.task for o in outcomes])
    drafted = _joined([o.drafted_k for o in outcomes]).astype(float)
    _add_tasks(tally, task, proposer, drafted, accepted.astype(float), emitted)


def _add_tasks(
    tally: Tally, task: Array, proposer: Array, drafted: Array, accepted: Array, emitted: Array
) -> None:
    ran = emitted > 0
    names, place = np.unique(task[ran], return_inverse=True)
    cell, cells = place * PROPOSERS + proposer[ran], len(names) * PROPOSERS
    weights = (np.ones(int(ran.sum())), drafted[ran], accepted[ran], emitted[ran])
    sums = np.stack([np.bincount(cell, weight, minlength=cells) for weight in weights])
    by_task = sums.reshape(4, len(names), PROPOSERS).transpose(1, 0, 2)
    tally.tasks = dict(zip(names.tolist(), by_task.copy(), strict=True))


def _beyond(proposer: Array, count: Array) -> Array:
    """Return f64 [PROPOSERS, POSITIONS]: rows of each proposer whose count is above a position."""
    count = np.clip(count, 0, POSITIONS).astype(np.intp)
    cells = np.bincount(
        proposer * (POSITIONS + 1) + count, minlength=PROPOSERS * (POSITIONS + 1)
    ).reshape(PROPOSERS, POSITIONS + 1)
    rows: Array = cells[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    return rows


def _add_calibration(tally: Tally, outcomes: Sequence[StepOutcome], plans: dict[int, Plan]) -> None:
    parts = [part for o in outcomes if (part := _predicted(o, plans)) is not None]
    if not parts:
        return
    proposer = _joined([p[0] for p in parts])
    chance, held = _joined([p[1] for p in parts]), _joined([p[2] for p in parts])
    cell = proposer * BINS + np.minimum((chance * BINS).astype(np.intp), BINS - 1)
    for place, weight in enumerate((chance, held, np.ones(len(cell)))):
        sums = np.bincount(cell, weight, minlength=PROPOSERS * BINS)
        tally.bins[:, :, place] += sums.reshape(PROPOSERS, BINS)


def _predicted(outcome: StepOutcome, plans: dict[int, Plan]) -> tuple[Array, Array, Array] | None:
    """Return proposer, predicted chance and whether it held, of each place that was reached.

    None where the step followed no plan of ours that has estimates. The chance is of a token that
    is reached: the survival at its place over that at the one before.
    """
    rows = np.flatnonzero((outcome.plan_source == PlanSource.REMOTE) & (outcome.verified_k > 0))
    plan = plans.get(int(outcome.plan_step_id[rows[0]])) if len(rows) else None
    if plan is None or plan.survival is None or not len(plan):
        return None
    at = _places(plan.request_id, outcome.request_id[rows])
    rows, at = rows[at >= 0], at[at >= 0]
    proposer = outcome.proposer[rows].astype(np.intp)
    survival = plan.survival[at, proposer].astype(float)
    if plan.match_hazard is not None and plan.match_frailty is not None:
        match = outcome.match_tokens[rows]
        hazard = plan.match_hazard[match_bucket(match)]
        now = ngram_survival(hazard, plan.match_frailty[at], match)
        survival = np.where((proposer == NGRAM)[:, None], now, survival)
    before = np.concatenate([np.ones((len(rows), 1)), survival[:, :-1]], axis=1)
    accepted = outcome.accepted[rows]
    place = np.arange(survival.shape[1])
    reach = np.minimum(accepted + 1, outcome.verified_k[rows])
    seen = (place < reach[:, None]) & (before > 0.0)
    chance = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0.0)
    held = place < accepted[:, None]
    return np.repeat(proposer, seen.sum(axis=1)), chance[seen], held[seen].astype(float)


def _places(known: Array, asked: Array) -> Array:
    """Return where each asked id stands among the known, -1 where it does not."""
    order = np.argsort(known)
    place = order[np.minimum(np.searchsorted(known, asked, sorter=order), len(known) - 1)]
    found: Array = np.where(known[place] == asked, place, -1)
    return found


def calibration_error(bins: Array) -> Array:
    """Return the expected calibration error of each proposer, f64 [PROPOSERS], nan unseen.

    Mean over places of |predicted - actual| by bin (Naeini et al. 2015).
    """
    predicted, actual, places = np.moveaxis(bins, -1, 0)
    total = places.sum(axis=1)
    error: Array = np.full(len(total), np.nan)
    np.divide(np.abs(predicted - actual).sum(axis=1), total, out=error, where=total > 0)
    return error


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0)
