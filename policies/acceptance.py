"""What will be accepted: censored discrete hazards with a frailty for each task and request.

hazard[c, j] = P(reject at position j | reached) in channel c (the n-gram has one a match bucket,
other proposers one each). A row is at risk at positions j <= accepted + 1 and j <= verified; full
acceptance censors. k was chosen from the request's own history, so rows seen deep are the easy
ones: a request's frailty z multiplies its hazards, z = (a y + rejections) / (a + expected), y the
task's, and exposures are weighted by the z that was known just before each position. Rejections
minus z * hazard is then a martingale whatever chose k, and the pooled hazards are those of an
average request.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from parlay.policies.acceptance_rows import TASKS, Rows
from parlay.policies.allocate import HAZARD_CEILING
from parlay.policies.counts import Counts
from parlay.policies.evidence import Draft, Drafts, draft_of, drafts_of, merged
from parlay.policies.strength import Number, Strength, lean
from parlay.policies.types import (
    DRAFT_MODEL,
    MATCH_EDGES,
    MEDUSA,
    NGRAM,
    PROPOSERS,
    Array,
    StepOutcome,
    match_bucket,
)

BUCKETS = len(MATCH_EDGES) + 1
CHANNELS = BUCKETS + PROPOSERS - 2
"""N-gram match buckets, then the draft model, then Medusa."""
CHANNEL_PROPOSER = np.array([NGRAM] * BUCKETS + list(range(DRAFT_MODEL, PROPOSERS)))

# Optimistic: a proposer that is never tried teaches nothing. Worth many observations, because the
# first positions after a prompt accept little and sixteen requests may start in one step.
PRIOR_HAZARD = np.array([0.9, 0.6, 0.45, 0.35, 0.3, 0.25, 0.2, 0.15, 0.35, 0.4])
PRIOR_ROWS = 24.0
_PRIOR = PRIOR_ROWS * PRIOR_HAZARD[:, None]
NEIGHBOUR_ROWS = 12.0
NEIGHBOUR_REACH = 0.5
HALF_LIFE_ROWS = 600.0
TASK_STRENGTH = 6.0
TASK_HALF_LIFE_ROWS = 400.0
REQUEST_DECAY = 0.955
"""A step heard of, drafted in or not: what text was like twenty tokens ago says little of it now.
With the shipped draft on five kinds of text decays of .9 to .975 foretold the next rejection best
everywhere but on data."""
_DRIFT_PER_STEP = 5e-5
"""Variance by which the log of a task's hazards may have moved in a step unseen."""
_HOPE = 1.5
FIRST_TOKENS = 2
FIRST_WEIGHT = 0.25
_ROW_DECAY = 0.5 ** (1.0 / HALF_LIFE_ROWS)
_TASK_ROW_DECAY = 0.5 ** (1.0 / TASK_HALF_LIFE_ROWS)
HAZARD_FLOOR = 0.005

Watch = Callable[[Array | int, Array | int, Array | float, Array | float], None]
"""Told of drafts, [n] or one: task rows, proposers, rejections beyond those foretold, variance."""


def channel_of(proposer: Array, match_tokens: Array) -> Array:
    """Return the channel of each row; meaningless where proposer is NONE."""
    other = BUCKETS + proposer.astype(np.intp) - DRAFT_MODEL
    return np.where(proposer == NGRAM, match_bucket(match_tokens), other)


def _level(rejected: Number, expected: Number) -> Number:
    """Return the frailty of a task of so many rejections and expected ones."""
    level: Number = (TASK_STRENGTH + rejected) / (TASK_STRENGTH + expected)
    return level


class Acceptance:
    """Estimates survival per request and proposer; learns from every verified or shadowed draft.

    heads: whether the engine has Medusa, whose survival is else left at 0.
    """

    def __init__(self, k_max: int, heads: bool = True) -> None:
        self.k_max, self.heads = k_max, heads
        # Rejections and exposures.
        self.places = np.zeros((2, CHANNELS, k_max))
        self.hazard = np.zeros((CHANNELS, k_max))
        # What other replicas counted: decided on, neither aged nor passed on here.
        self.others = np.zeros((2, CHANNELS, k_max))
        self.rows = np.zeros(PROPOSERS)
        self.loaded = False
        self._strength = Strength()
        self.watch: Watch | None = None
        self._total = np.zeros((2, CHANNELS, k_max))
        self._snapshots = {0: self._total.copy()}
        self._table = Rows()
        places = np.arange(k_max)
        lag = places - places[:, None]
        self._before = (lag > 0).astype(float)
        self._neighbours = np.where(lag >= 0, NEIGHBOUR_REACH ** np.maximum(lag, 0), 0.0)
        self._refit()

    @property
    def version(self) -> int:
        """Return how many steps were heard of."""
        return self._table.now

    @property
    def rejected(self) -> Array:
        """Return f64 [CHANNELS, K]: rejections at each place, discounted."""
        rejected: Array = self.places[0]
        return rejected

    @property
    def exposed(self) -> Array:
        """Return f64 [CHANNELS, K]: the frailty of drafts that reached each place, discounted."""
        exposed: Array = self.places[1]
        return exposed

    @property
    def task_rows(self) -> Array:
        """Return the row of each task, in the order in which `state` has them."""
        return self._table.tasks

    def rows_of(self, request_id: Array, task: Array, output_tokens: Array | None = None) -> Array:
        """Return each request's row in the tables, making new ones; see `Rows.of`."""
        return self._table.of(request_id, task, output_tokens)

    def frailty(self, rows: Array) -> Array:
        """Return f64 [rows, PROPOSERS]: what multiplies the hazards of each request."""
        strength, table = self._strength.of, self._table
        if len(rows) == 1:
            row, task = int(rows[0]), int(table.task_of[rows[0]])
            rejected, expected = table.task[:, task] + table.others[:, task]
            prior = strength * _level(rejected, expected)
            rejected, expected = table.request[:, row]
            one: Array = ((prior + rejected) / (strength + expected))[None]
            return one
        prior = strength * self._task_frailty()[table.task_of[rows]]
        rejected, expected = table.request.take(rows, axis=1)
        frailty: Array = (prior + rejected) / (strength + expected)
        return frailty

    def least_frailty(self, rows: Array, frailty: Array, proposer: int, quiet_steps: int) -> Array:
        """Return `frailty` with one proposer's as low as what is known of it allows.

        That is _HOPE standard deviations lower: its task's rejections are about a Poisson count,
        and what was not seen for quiet_steps may have drifted.
        """
        known = 1.0 + self._table.in_all[0, self._table.task_of[rows], proposer]
        least = frailty.copy()
        sd = np.sqrt(1.0 / known + _DRIFT_PER_STEP * quiet_steps)
        least[:, proposer] *= np.exp(-_HOPE * sd)
        return least

    def survival(self, frailty: Array, match_tokens: Array, only: int | None = None) -> Array:
        """Return f32 [rows, PROPOSERS, K]: P(first j drafts hold), the n-gram's 0 without match.

        only: of one proposer, [rows, 1, K].
        """
        first, end = NGRAM, PROPOSERS if self.heads else MEDUSA
        if len(frailty) == 1 and only is None:
            return self._survival_of_one(frailty[0], int(match_tokens[0]), end)
        if only is not None:
            first, end = only, only + 1
        # Places before rows, as the solver wants them.
        hold = np.zeros((PROPOSERS if only is None else 1, self.k_max, len(frailty)), np.float32)
        some = hold[first:end] if only is None else hold
        times = frailty.T[first:end].astype(np.float32)
        models = max(DRAFT_MODEL - first, 0)
        if first == NGRAM:
            bucket = match_bucket(match_tokens)
            np.multiply(self._hazard.T[:, bucket], times[0], out=some[0])
        if models < len(some):
            at = BUCKETS + first + models - DRAFT_MODEL
            of = self._hazard[at : at + len(some) - models, :, None]
            np.multiply(of, times[models:, None], out=some[models:])
        np.subtract(1.0, np.minimum(some, HAZARD_CEILING, out=some), out=some)
        if first == NGRAM:
            some[0, 0] *= bucket > 0
        for place in range(1, self.k_max):  # numpy's own accumulation takes three times as long
            np.multiply(some[:, place], some[:, place - 1], out=some[:, place])
        return hold.transpose(2, 0, 1)

    def _survival_of_one(self, frailty: Array, match_tokens: int, end: int) -> Array:
        """Do what `survival` does for a batch of one, whose arrays would be mostly overhead."""
        hold = np.zeros((1, PROPOSERS, self.k_max), np.float32)
        bucket = bisect_right(MATCH_EDGES, match_tokens)
        some = self._hazard.take([bucket, *range(BUCKETS, BUCKETS + end - DRAFT_MODEL)], axis=0)
        some *= frailty[NGRAM:end, None].astype(np.float32)
        some = 1.0 - np.minimum(some, HAZARD_CEILING)
        some[0] *= bucket > 0
        np.multiply.accumulate(some, axis=1, out=hold[0, NGRAM:end])
        return hold

    def match_hazard(self) -> Array:
        """Return f32 [match buckets, K] for the plan."""
        return self._hazard[:BUCKETS]

    def observe(self, outcome: StepOutcome, doubt: Array | None = None) -> Array:
        """Learn from a step; return bool [PROPOSERS], whose drafts it showed.

        doubt f64 [rows]: where a draft was stopped short, the drafter's own estimate that the next
        token would have been rejected, nan elsewhere. It stands for the flip that was not seen.
        """
        self._table.now += 1
        shown = np.zeros(PROPOSERS, bool)
        if len(outcome):
            rows = self.rows_of(outcome.request_id, outcome.task)
            # One row by a slice: a view costs a third of what picking rows does.
            at = slice(int(rows[0]), int(rows[0]) + 1) if len(rows) == 1 else rows
            self._table.request[:, at] *= REQUEST_DECAY
            self._learn(outcome, rows, shown, doubt)
            self._table.output[at] += outcome.emitted
        if self.version % 64 == 0:
            self._table.forget()
        return shown

    def observe_all(self, outcomes: list[tuple[StepOutcome, Array | None]]) -> list[Array]:
        """Do what `observe` does of some steps and their doubts, in little more time than of one.

        Their drafts are judged by what was known before the first of them.
        """
        shown = [np.zeros(PROPOSERS, bool) for _ in outcomes]
        table, parts, weights = self._table, list[Drafts](), list[Array]()
        for (outcome, doubt), proposers in zip(outcomes, shown, strict=True):
            table.now += 1
            if not len(outcome):
                continue
            rows = self.rows_of(outcome.request_id, outcome.task)
            table.request[:, rows] *= REQUEST_DECAY
            if len(outcome.shadow) or outcome.verified_k.any() or doubt is not None:
                known = table.known(outcome.shadow.request_id)
                drafts = drafts_of(outcome, rows, known, doubt)
                proposers[drafts.proposer] = True
                parts.append(drafts)
                weights.append(self._weight(drafts.row))
            table.output[rows] += outcome.emitted
        if parts and len((drafts := merged(parts)).row):
            self._count_all(drafts, np.concatenate(weights))
        if self.version // 64 > (self.version - len(outcomes)) // 64:
            table.forget()
        return shown

    def _learn(self, outcome: StepOutcome, rows: Array, shown: Array, doubt: Array | None) -> None:
        if len(rows) == 1 and not len(outcome.shadow):
            draft = draft_of(outcome, int(rows[0]), doubt)
            if draft is not None:
                self._count_one(draft)
                shown[draft.proposer] = True
            return
        drafts = drafts_of(outcome, rows, self._table.known(outcome.shadow.request_id), doubt)
        if len(drafts.row):
            self._count_all(drafts)
            shown[drafts.proposer] = True

    def _count_one(self, draft: Draft) -> None:
        """Do what `_count_all` does for a single draft, whose arrays would be mostly overhead."""
        row, proposer, accepted, seen = draft.row, draft.proposer, draft.accepted, draft.seen
        channel = bisect_right(MATCH_EDGES, draft.match_tokens)
        if proposer != NGRAM:
            channel = BUCKETS + proposer - DRAFT_MODEL
        reached = min(accepted + 1, seen, self.k_max)
        weight = FIRST_WEIGHT if self._table.output[row] < FIRST_TOKENS else 1.0
        task = int(self._table.task_of[row])
        own = self._table.task[:, task, proposer]
        (rejections, hazards), others = own.tolist(), self._table.others[:, task, proposer].tolist()
        task_frailty = _level(rejections + others[0], hazards + others[1])
        rejected, expected = self._table.request[:, row, proposer].tolist()
        strength = float(self._strength.of[proposer])
        prior, known = strength * task_frailty + rejected, strength + expected
        before = expected_of_task = foretold = variance = 0.0
        exposure: list[float] = []
        for hazard in self.hazard[channel, :reached].tolist():
            frailty = prior / (known + before)
            exposure.append(frailty * weight)
            foretold += (chance := min(hazard * frailty, HAZARD_CEILING))
            variance += chance * (1.0 - chance)
            expected_of_task += hazard * math.sqrt(frailty / task_frailty)
            before += hazard
        self.rows[proposer] += 1
        aged = slice(BUCKETS) if proposer == NGRAM else slice(channel, channel + 1)
        self.places[:, aged] *= _ROW_DECAY
        self._table.drafts[task, proposer] += 1
        fails = accepted < min(seen, self.k_max)
        failed = draft.share * weight if fails else 0.0
        foretold *= weight
        leans = lean(strength, task_frailty, rejected, expected)
        self._strength.learn_one(proposer, leans, failed - foretold, foretold, expected)
        if self.watch is not None:
            self.watch(task, proposer, failed - foretold, weight * weight * variance)
        if fails:
            self._total[0, channel, accepted] += failed
            self.places[0, channel, accepted] += failed
        reach = np.array(exposure)
        self._total[1, channel, :reached] += reach
        self.places[1, channel, :reached] += reach
        self._table.request[:, row, proposer] = rejected + failed, expected + before * weight
        own[:] = (
            rejections * _TASK_ROW_DECAY + failed,
            hazards * _TASK_ROW_DECAY + expected_of_task * weight,
        )
        self._refit()

    def _weight(self, row: Array) -> Array:
        """Return how much a draft of each row counts now."""
        return np.where(self._table.output[row] < FIRST_TOKENS, FIRST_WEIGHT, 1.0)

    def _count_all(self, drafts: Drafts, weight: Array | None = None) -> None:
        """Add drafts to every table, each `weight` f64 [drafts] times; None: as `_weight` says."""
        row, proposer, accepted = drafts.row, drafts.proposer, drafts.accepted
        channel = channel_of(proposer, drafts.match_tokens)
        place = np.arange(self.k_max)
        at_risk = place < np.minimum(accepted + 1, drafts.seen)[:, None]
        failed = drafts.share * ((accepted < drafts.seen) & (accepted < self.k_max))
        hazard = np.where(at_risk, self.hazard[channel], 0.0)
        before = hazard.cumsum(axis=1) - hazard
        task = self._table.task_of[row]
        task_frailty = self._task_frailty()[task, proposer]
        rejected, expected = self._table.request[:, row, proposer]
        strength = self._strength.of[proposer]
        prior = (strength * task_frailty + rejected)[:, None]
        frailty = prior / ((strength + expected)[:, None] + before)
        weight = self._weight(row) if weight is None else weight
        chance = np.minimum(hazard * frailty, HAZARD_CEILING)
        foretold = chance.sum(axis=1) * weight
        excess = failed * weight - foretold
        leans = lean(strength, task_frailty, rejected, expected)
        self._strength.learn(proposer, leans, excess, foretold, expected)
        if self.watch is not None:
            left = ((chance * (1.0 - chance)).sum(axis=1) * weight) * weight
            self.watch(task, proposer, excess, left)
        self._age(proposer, task)
        exposure = at_risk * (frailty * weight[:, None])
        failed *= weight
        rejection = (place == accepted[:, None]) * failed[:, None]
        counts = np.zeros(self._total.shape)
        np.add.at(counts[0], channel, rejection)
        np.add.at(counts[1], channel, exposure)
        self._total += counts
        self.places += counts
        np.add.at(self._table.request[0], (row, proposer), failed)
        np.add.at(self._table.request[1], (row, proposer), hazard.sum(axis=1) * weight)
        np.add.at(self._table.task[0], (task, proposer), failed)
        # Half of what a request is thought to differ from its task by is chance. Were all of it
        # believed, drafting where all goes well would make the task look worse than it is.
        relative = np.sqrt(frailty / task_frailty[:, None])
        expected = (hazard * relative).sum(axis=1)
        np.add.at(self._table.task[1], (task, proposer), expected * weight)
        self._refit()

    def _age(self, proposer: Array, task: Array) -> None:
        """Discount what is known, each table by the rows it is about to take."""
        rows = np.bincount(proposer, minlength=PROPOSERS)
        self.rows += rows
        decay = 0.5 ** (rows / HALF_LIFE_ROWS)
        self.places *= decay[CHANNEL_PROPOSER][:, None]
        counts = np.bincount(task * PROPOSERS + proposer, minlength=TASKS * PROPOSERS)
        task_rows = counts.reshape(TASKS, PROPOSERS)
        self._table.drafts += task_rows
        self._table.task *= 0.5 ** (task_rows / TASK_HALF_LIFE_ROWS)

    def forget(self, task: int, proposer: int, rows: float) -> None:
        """Age what a task, by its row, knows of a proposer as if `rows` more had shown nothing.

        All tasks' hazards age as far as they are this task's; what requests showed fades anyway.
        """
        known = self._table.task[1, :, proposer]
        share = float(known[task]) / max(float(known.sum()), 1e-9)
        self._table.drafts[task, proposer] += rows
        self.rows[proposer] += rows * share
        self._table.task[:, task, proposer] *= 0.5 ** (rows / TASK_HALF_LIFE_ROWS)
        by_channel = (0.5 ** (rows * share / HALF_LIFE_ROWS)) ** (proposer == CHANNEL_PROPOSER)
        self.places *= by_channel[:, None]
        self._refit()

    def _refit(self) -> None:
        """Shrink each position to the shallower ones near it, and those to the prior."""
        rejected, exposed = places = self.places + self.others
        near_rejected, near_exposed = places @ self._neighbours
        near = (_PRIOR + near_rejected) / (PRIOR_ROWS + near_exposed)
        hazard = (NEIGHBOUR_ROWS * near + rejected) / (NEIGHBOUR_ROWS + exposed)
        self.hazard = np.minimum(np.maximum(hazard, HAZARD_FLOOR), HAZARD_CEILING)
        # Who reached a place has shown by it that its frailty is less than was known before.
        known = (self._strength.of + self._strength.expected).take(CHANNEL_PROPOSER)
        less = 1.0 + (self.hazard @ self._before) / known[:, None]
        self._hazard: Array = (self.hazard / less).astype(np.float32)

    def _task_frailty(self) -> Array:
        rejected, expected = self._table.in_all
        return _level(rejected, expected)

    def state(self) -> dict[str, Array]:
        """Return everything that later estimates depend on."""
        own = {
            "version": np.asarray(self.version),
            "rejected": self.rejected.copy(),
            "exposed": self.exposed.copy(),
            "strength": self._strength.state(),
        }
        return own | self._table.state()

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where shapes or names do not fit."""
        fresh = type(self)(self.k_max, self.heads)
        missing = set(fresh.state()) - set(state) - {"strength"}
        if missing:
            raise ValueError(f"acceptance state lacks {', '.join(sorted(missing))}")
        if np.shape(state["rejected"]) != (CHANNELS, self.k_max):
            raise ValueError(
                f"acceptance state is for {np.shape(state['rejected'])} channels and positions,"
                f" not {(CHANNELS, self.k_max)}: load it with the k_max that it was saved with"
            )
        self.__dict__.update(fresh.__dict__)
        self.loaded = True
        self.places = np.stack([state["rejected"], state["exposed"]])
        if "strength" in state:
            self._strength.load(state["strength"])
        self._table.load(state, int(state["version"]))
        self._refit()

    def counted(self) -> Counts:
        """Return what was counted here and nowhere else."""
        table, at = self._table, self._table.tasks
        return Counts(
            self.places.copy(), self.rows.copy(), table.task_id, table.task[:, at], table.drafts[at]
        )

    def known(self) -> Counts:
        """Return what is decided on, own and others' counts in one, of tasks as in `counted`."""
        own, others = self.counted(), self._table.others[:, self._table.tasks]
        return replace(own, places=own.places + self.others, task_counts=own.task_counts + others)

    def join(self, own: Counts, others: Counts) -> None:
        """Go on from `own`, of tasks as in `counted`; from now decide on these and on `others`."""
        self.places = own.places.copy()
        self.others = others.places.copy()
        self._table.take_tasks(own.task_id, own.task_counts)
        self._table.take_others(others.task_id, others.task_counts)
        self._refit()

    def delta(self, since: int) -> dict[str, Array]:
        """Return what was counted since `since`, a version that an earlier delta returned, or 0."""
        if since not in self._snapshots:
            raise ValueError(f"no delta was taken at version {since}; ask for one since 0")
        counts = self._total - self._snapshots[since]
        self._snapshots[self.version] = self._total.copy()
        for old in sorted(self._snapshots)[1:-8]:
            del self._snapshots[old]
        return {"version": np.asarray(self.version), "counts": counts}

    def merge(self, deltas: list[dict[str, Array]]) -> None:
        """Add others' counts as if seen here; raises ValueError where the shape is wrong."""
        for delta in deltas:
            if "counts" not in delta or np.shape(delta["counts"]) != self._total.shape:
                raise ValueError(f"a delta needs counts of shape {self._total.shape}")
            self.places += delta["counts"]
        self._refit()
