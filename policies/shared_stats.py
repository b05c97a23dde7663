"""What replicas of one policy learn together: own counts beside others', and what a new one takes.

Only the counts of acceptance can be added up: what text is like is the same on every replica. Every
replica passes on its own counts and decides on their sum with all others'. Counts are discounted by
rows, so each replica also ages its own by the rows that the others told of, as if both had come in
turn; the sum is then what one replica would hold that had seen every row. Step times and the fit of
the drafter's confidence are windows of the newest steps, which cannot be added: they stay at home,
and only a new replica takes another's. Policies without such counts are saved and taken whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parlay.policies.acceptance import (
    CHANNEL_PROPOSER,
    CHANNELS,
    HALF_LIFE_ROWS,
    TASK_HALF_LIFE_ROWS,
    Acceptance,
)
from parlay.policies.counts import Counts
from parlay.policies.policy import Policy
from parlay.policies.types import PROPOSERS, Array

STALE_S = 2.0
"""A slot this old is of a replica that is silent; a live one renews it several times a second."""
FADE_S = 15.0
"""Half-life of what a silent replica counted, on top of the rows that others counted since."""
GONE_S = 60.0
STAND_IN_FADE_S = 86_400.0
"""Half-life of the counts in a saved state, which stand in for what no replica tells of."""
_POOLED = "pooled."
_TAKEN = ("cost", "calibration")


@dataclass(slots=True, frozen=True)
class Slot:
    """The counts of another replica, and since when they stand, on this process's clock."""

    counts: Counts
    born_s: float


@dataclass(slots=True)
class _Heard:
    slot: Slot
    rows_since: Array
    saved: bool = False
    """A saved state's counts, which fade by rows only; no replica's."""


def acceptance_of(policy: Policy) -> Acceptance | None:
    """Return the counts' owner within a policy, under wrappers; None: it has nothing to add up."""
    owner: object = policy
    for name in ("policy", "core", "acceptance"):
        owner = getattr(owner, name, owner)
    return owner if isinstance(owner, Acceptance) else None


def aged_beside(
    now: Array, before: Array, own_rows: Array, other_rows: Array, half_life_rows: float
) -> Array:
    """Age own sums by rows that others counted since `before`, as if theirs had come between ours.

    now, before: discounted by own rows only, alike in shape with `own_rows` and `other_rows` or
    broadcast to it. Own rows at an even pace: a sum that n rows left is (1 - d^n) long in rows,
    d^n = .5^(n / half-life); with m rows between them it is (1 - d^(n + m)) n / (n + m).
    """
    kept, told = 0.5 ** (own_rows / half_life_rows), 0.5 ** (other_rows / half_life_rows)
    some = own_rows > 0
    share = own_rows / np.where(some, own_rows + other_rows, 1.0)
    length = (1.0 - kept * told) / np.where(some, 1.0 - kept, 1.0)
    aged: Array = before * kept * told + np.maximum(now - before * kept, 0.0) * share * length
    return aged


def pooled(parts: Sequence[tuple[Counts, Array, Array]], like: Counts) -> Counts:
    """Add counts up, each weighted by proposer: f64 [PROPOSERS] for places and for tasks.

    like: counts of the right shape, for the sum of nothing.
    """
    tasks = np.unique(np.concatenate([like.task_id[:0], *(c.task_id for c, _, _ in parts)]))
    total = Counts(
        np.zeros_like(like.places),
        np.zeros(PROPOSERS),
        tasks,
        np.zeros((2, len(tasks), PROPOSERS)),
        np.zeros((len(tasks), PROPOSERS)),
    )
    for counts, weight, task_weight in parts:
        at = np.searchsorted(tasks, counts.task_id)
        total.places[:] += counts.places * weight[CHANNEL_PROPOSER][:, None]
        total.rows[:] += counts.rows
        total.task_counts[:, at] += counts.task_counts * task_weight
        total.task_rows[at] += counts.task_rows
    return total


class Pool:
    """One policy's counts among those of other replicas; used from the policy's thread only.

    What the policy was loaded with before (`parlay serve --warm-start`) stands in, as no counts of
    its own: replicas that begin with one file would pass it on once each.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self._heard: dict[str, _Heard] = {}
        self._others = Counts.none(CHANNELS, acceptance.k_max)
        if acceptance.loaded:
            self.stand_in(acceptance.counted(), 0.0)
        self.restart(forget=acceptance.loaded)

    def restart(self, forget: bool) -> None:
        """Go on after the policy was loaded; forget: what it was loaded with is not its own."""
        self.acceptance.loaded = False
        if forget:
            own, none = self.acceptance.counted(), Counts.none(CHANNELS, self.acceptance.k_max)
            zero = replace(own, places=none.places, task_counts=np.zeros_like(own.task_counts))
            self.acceptance.join(zero, self._others)
        self._before = self.acceptance.counted()

    def exchange(self, slots: Mapping[str, Slot] | None, now_s: float) -> Counts:
        """Take what the others counted, whole, and return what to pass on: own counts only.

        slots: by writer, without this one; None: nothing was heard, and what was ages.
        """
        own = self.acceptance.counted()
        own_rows = _told(own.rows, self._before.rows)
        if slots is not None:
            told, told_by_task = self._hear(slots, own_rows, now_s)
            own = self._aged(own, own_rows, told, told_by_task)
            self._before, own_rows = own, np.zeros(PROPOSERS)
        self._others = self._sum(own, own_rows, now_s)
        self.acceptance.join(own, self._others)
        return own

    def stand_in(self, counts: Counts, age_s: float) -> None:
        """Decide on saved counts too, as far as others tell of less.

        They fade with their age and by the rows counted from now on.
        """
        weight = np.full(PROPOSERS, 0.5 ** (age_s / STAND_IN_FADE_S))
        slot = Slot(pooled([(counts, weight, weight)], counts), 0.0)
        self._heard[_POOLED] = _Heard(slot, np.zeros(PROPOSERS), saved=True)

    def pooled(self) -> Counts:
        """Return own and others' counts in one: what a replica that is all alone may begin with."""
        own, one = self.acceptance.counted(), np.ones(PROPOSERS)
        return pooled([(own, one, one), (self._others, one, one)], own)

    def _hear(
        self, slots: Mapping[str, Slot], own_rows: Array, now_s: float
    ) -> tuple[Array, dict[int, Array]]:
        """Return the rows that others counted since they were last heard, in all and by task."""
        told, by_task = np.zeros(PROPOSERS), dict[int, Array]()
        for writer, slot in slots.items():
            known = self._heard.get(writer)
            if known is None:
                self._heard[writer] = _Heard(slot, np.zeros(PROPOSERS))
                continue
            told += _told(slot.counts.rows, known.slot.counts.rows)
            _add_tasks(by_task, slot.counts, known.slot.counts)
            known.slot = slot
        for heard in self._heard.values():
            live = not heard.saved and now_s - heard.slot.born_s <= STALE_S
            heard.rows_since = np.zeros(PROPOSERS) if live else heard.rows_since + own_rows + told
        return told, by_task

    def _aged(
        self, own: Counts, own_rows: Array, told: Array, told_by_task: dict[int, Array]
    ) -> Counts:
        before = self._before
        row_of = {task: row for row, task in enumerate(before.task_id.tolist())}
        past = [row_of.get(task, -1) for task in own.task_id.tolist()]
        # A row of zeros stands for tasks that were not there.
        past_counts = np.concatenate([before.task_counts, np.zeros((2, 1, PROPOSERS))], 1)[:, past]
        past_rows = np.concatenate([before.task_rows, np.zeros((1, PROPOSERS))])[past]
        nothing = np.zeros(PROPOSERS)
        others = np.array([told_by_task.get(t, nothing) for t in own.task_id.tolist()])
        at = CHANNEL_PROPOSER
        return replace(
            own,
            places=aged_beside(
                *(own.places, before.places, own_rows[at, None], told[at, None], HALF_LIFE_ROWS)
            ),
            task_counts=aged_beside(
                *(own.task_counts, past_counts, _told(own.task_rows, past_rows)),
                *(others.reshape(-1, PROPOSERS), TASK_HALF_LIFE_ROWS),
            ),
        )

    def _sum(self, own: Counts, own_rows: Array, now_s: float) -> Counts:
        """Return the others' counts, faded; own_rows: counted here since they were last heard."""
        parts, told, stand_in = [], np.zeros(PROPOSERS), None
        for writer, heard in list(self._heard.items()):
            age_s = 0.0 if heard.saved else now_s - heard.slot.born_s
            if age_s > GONE_S:
                del self._heard[writer]
                continue
            faded = 0.5 ** (max(age_s - STALE_S, 0.0) / FADE_S)
            live = not heard.saved and age_s <= STALE_S
            rows = heard.rows_since + (0.0 if live else own_rows)
            weight = faded * 0.5 ** (rows / HALF_LIFE_ROWS)
            task_weight = faded * 0.5 ** (rows / TASK_HALF_LIFE_ROWS)
            part = (heard.slot.counts, weight, task_weight)
            if heard.saved:
                stand_in = part
                continue
            parts.append(part)
            told += weight * _exposed(heard.slot.counts)
        if stand_in is not None:
            counts, weight, task_weight = stand_in
            lacking = 1.0 - np.minimum(told / np.maximum(weight * _exposed(counts), 1e-9), 1.0)
            parts.append((counts, weight * lacking, task_weight * lacking))
        return pooled(parts, own)


def known_state(policy: Policy) -> dict[str, Array]:
    """Return copies of a policy's state, in which what others counted is as if counted here."""
    state = {name: np.array(array) for name, array in policy.state().items()}
    acceptance = acceptance_of(policy)
    if acceptance is not None and acceptance.others.any():
        known = acceptance.known()
        sums = dict(zip(("rejected", "exposed"), known.places, strict=True))
        sums["task_counts"] = known.task_counts
        for name in state:
            owner, _, what = name.rpartition(".")
            if owner.split(".")[-1] == "acceptance" and what in sums:
                state[name] = sums[what]
    return state


def saved_of(policy: Policy, pool: Pool | None) -> dict[str, Array]:
    """Return copies of all that `warmed` needs: the policy's state, and the pooled counts."""
    saved = {name: np.array(array) for name, array in policy.state().items()}
    if pool is not None:
        saved |= {_POOLED + name: array for name, array in pool.pooled().arrays().items()}
    return saved


def warm(
    policy: Policy,
    pool: Pool | None,
    saved: Mapping[str, Array],
    age_s: float,
    same_engine: bool,
) -> None:
    """Let a policy begin where a saved one was; raises ValueError, the policy as before, if unfit.

    A state of the same engine is taken whole; of another's, where counts are pooled, only what is
    no request's and no schedule: step times and calibration. The counts in it are never own ones,
    and stand in.
    """
    state = {name: array for name, array in saved.items() if not name.startswith(_POOLED)}
    before = {name: np.array(array) for name, array in policy.state().items()}
    if pool is not None and not same_engine:
        taken = {n: a for n, a in state.items() if not set(n.split(".")).isdisjoint(_TAKEN)}
        state = before | taken
    counts = None
    if pool is not None:
        head = len(_POOLED)
        arrays = {n[head:]: a for n, a in saved.items() if n.startswith(_POOLED)}
        counts = Counts.of_arrays(arrays, CHANNELS, pool.acceptance.k_max)
    try:
        policy.load(state)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        policy.load(before)
        if pool is not None:
            pool.restart(forget=False)
        raise ValueError(f"a saved state does not fit: {error}") from None
    if pool is not None and counts is not None:
        pool.restart(forget=same_engine)
        pool.stand_in(counts, age_s)


def _exposed(counts: Counts) -> Array:
    """Return exposures by proposer, f64 [PROPOSERS]."""
    return np.bincount(CHANNEL_PROPOSER, counts.places[1].sum(axis=1), PROPOSERS)


def _told(rows: Array, known: Array) -> Array:
    """Return by how much counts of rows grew; one that fell has begun again."""
    grown: Array = np.where(rows >= known, rows - known, rows)
    return grown


def _add_tasks(by_task: dict[int, Array], counts: Counts, known: Counts) -> None:
    row_of = {task: row for row, task in enumerate(known.task_id.tolist())}
    for row, task in enumerate(counts.task_id.tolist()):
        past = row_of.get(task)
        grown = counts.task_rows[row]
        grown = _told(grown, known.task_rows[past]) if past is not None else grown
        by_task[task] = by_task.get(task, np.zeros(PROPOSERS)) + grown
