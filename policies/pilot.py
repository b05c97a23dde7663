"""The flagship: goodput's estimates and plan, with each request's worth, scarce memory and a guard.

`goodput` makes every token count the same. Here a token counts by the time its request needs for
one: an answer has as many tokens whatever is drafted, so one saved where they come one by one frees
its place a step sooner, one more where eight come at once hardly at all. It counts more where a
request is behind its latency target, less where that has time to spare, and more again where others
have kept one from drafting for long; a drafted token costs more as the cache fills; and the guard
sees to it that the whole is never slower than not speculating. An engine that starts climbs a short
staircase of token counts, and a task that begins to accept otherwise is forgotten faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parlay.policies.change_point import ChangePoints
from parlay.policies.goodput import Goodput, GoodputSettings
from parlay.policies.guard import Guard
from parlay.policies.guard_terms import GuardSettings
from parlay.policies.policy import EngineLimits, Policy, register
from parlay.policies.solver import priced, usable
from parlay.policies.staircase import Staircase
from parlay.policies.types import (
    K_LIMIT,
    NO_BUDGET,
    Array,
    BatchView,
    Plan,
    Reason,
    StepOutcome,
    StopRule,
)

_URGENCY = 2.0
_LEAST_WEIGHT, _MOST_WEIGHT = 0.5, 4.0
_PACE_DECAY = 0.9
"""Weight of the past in a request's time a token: about its last ten tokens. Longer ones follow the
text too late: .95 and .97 lost .3 and .8% on recorded answers in batches of 16."""
_LEAST_NEED, _MOST_NEED = 0.2, 4.0
_NEED_POWER = 0.375
"""A request's pace foretells its next tokens only in part."""
_STARVED_WEIGHT = 8.0
_SCARCE_SHARE = 0.1
"""Of the cache free: below it a drafted token has a price."""
_PROBE_SHARE = 0.004
_FORGET_ROWS, _FORGET_MOST = 150, 1200
"""A task whose acceptance changed is aged by so many drafts for each request at once, at most until
an eighth of what it knew is left: the fewer run, the longer it takes to know as much again."""
_VERSION = "pilot/1"
_ALL = slice(None)


@dataclass(slots=True, frozen=True)
class PilotSettings:
    """k_max: most tokens drafted for one request in a step. starved_steps: longest that a request
    which gains by drafting goes without while others draft. guard: whether the gain is watched.
    seed: of the guard's blocks.
    """  # noqa: D205

    k_max: int = 12
    starved_steps: int = 64
    guard: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.k_max <= K_LIMIT:
            raise ValueError(f"pilot: k_max must be between 1 and {K_LIMIT}, not {self.k_max}")
        if self.starved_steps < 1:
            raise ValueError(f"pilot: starved_steps must be 1 or more, not {self.starved_steps}")
        if self.seed < 0:
            raise ValueError(f"pilot: seed must be 0 or more, not {self.seed}")


@register("pilot", PilotSettings)
def pilot(settings: PilotSettings, limits: EngineLimits) -> Policy:
    """Return the flagship, under its guard unless that is off."""
    core = Pilot(settings, limits)
    if not settings.guard:
        return core
    guard = Guard(core, GuardSettings(probe_share=_PROBE_SHARE, seed=settings.seed))
    guard.name = core.name
    return guard


class Pilot:
    """Plans for the most worth a millisecond; deterministic from its history."""

    name = "pilot"
    learns_late = Goodput.learns_late

    def __init__(self, settings: PilotSettings, limits: EngineLimits) -> None:
        self.settings = settings
        self.core = Goodput(GoodputSettings(settings.k_max), limits)
        self.staircase, self.changes = Staircase(), ChangePoints()
        self.core.acceptance.watch = self.changes.note
        # By request: pace in ms a token (nan: none yet), and steps since it drafted while others
        # did. Sorted by id, so that a step's rows are found at once; the last batch is kept found.
        self._ids = np.zeros(0, np.uint64)
        self._pace_ms, self._waited = np.zeros(0), np.zeros(0, np.int32)
        self._batch: bytes | None = None
        self._at = np.zeros(0, np.intp)

    @property
    def expected_gain(self) -> float:
        """Return the last plan's goodput over that of no speculation, as the estimates have it."""
        return self.core.expected_gain

    def decide(self, view: BatchView) -> Plan:
        """Return the plan for the batch in `view`."""
        self._keep(view.request_id)
        weight, price_ms = self._need() * self._urgency(view), self._block_price_ms(view)
        plan = self.core.weighted(view, weight, price_ms)
        if self.staircase.due():
            plan = self._climb(view, plan, weight, price_ms)
        plan.policy_version = _VERSION
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from one finished step."""
        self.core.observe(outcome)
        self._note(outcome)

    def observe_all(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn from some finished steps at once, which takes less time."""
        self.core.observe_all(outcomes)
        for outcome in outcomes:
            self._note(outcome)

    def _note(self, outcome: StepOutcome) -> None:
        self.staircase.observe(outcome)
        for task, proposer in self.changes.found():
            rows = min(_FORGET_ROWS * len(outcome), _FORGET_MOST)
            self.core.acceptance.forget(task, proposer, rows)
            self.core.explorer.look_soon()
        at, known = self._places(outcome.request_id)
        if len(at) == 1 and known is _ALL:
            self._note_one(outcome)
            return
        at, emitted = at[known], outcome.emitted[known].astype(float)
        old, pace = self._pace_ms[at], outcome.step_ms / np.maximum(emitted, 1.0)
        kept = _PACE_DECAY**emitted
        mixed = np.where(np.isnan(old), pace, kept * old + (1.0 - kept) * pace)
        self._pace_ms[at] = np.where(emitted > 0, mixed, old)
        drafted = outcome.drafted_k[known] > 0
        if drafted.any():
            self._waited[at] = np.where(drafted, 0, self._waited[at] + 1)

    def _note_one(self, outcome: StepOutcome) -> None:
        """Do what `_note` does at its end for a batch of one, whose arrays would be overhead."""
        if (emitted := int(outcome.emitted[0])) > 0:
            old, pace, kept = (
                float(self._pace_ms[0]),
                outcome.step_ms / emitted,
                _PACE_DECAY**emitted,
            )
            self._pace_ms[0] = pace if math.isnan(old) else kept * old + (1.0 - kept) * pace
        if outcome.drafted_k[0] > 0:
            self._waited[0] = 0

    def _climb(self, view: BatchView, plan: Plan, weight: Array, price_ms: float) -> Plan:
        """Return `plan`, or a rung of the staircase where one is due."""
        quiet = not (view.prefill_tokens.any() or (plan.reason == Reason.EXPLORE).any())
        if not quiet or plan.survival is None or not len(view):
            return plan
        worth = usable(view, plan.survival) * weight[:, None, None]
        costs, emits = self.core.costs(view, price_ms), max(float(weight.sum()), 1.0)
        price = plan.marginal_token_price_ms
        best = priced(worth, costs, emits, plan.proposer, plan.k.astype(np.int32), price)
        taught = self.core.step_time.taught
        rung = self.staircase.rung(view, worth, costs, emits, best, taught)
        if rung is None:
            return plan
        budget = NO_BUDGET if plan.budget_tokens == NO_BUDGET else int(rung.k.sum())
        return replace(
            plan,
            proposer=rung.proposer,
            k=rung.k.astype(np.int16),
            reason=np.full(len(view), Reason.WARM_UP, np.uint8),
            budget_tokens=budget,
            stop_rule=StopRule(),
        )

    def _need(self) -> Array:
        """Return f64 [rows]: how long a row's token takes of late, of what one takes on average.

        A row that emits r tokens a step, where rows emit m on average, holds its place for 1 / r
        steps a token, in which another would emit m / r: so much is a token worth that comes now
        and not later. That goes for texts that stay as they are; they do not, and paces are noisy,
        so that a smaller power of it pays more.
        """
        pace = self._pace_ms[self._at]
        known = np.isfinite(pace)
        if len(pace) == 1 or not known.any():
            return np.ones(len(pace))
        need = np.where(known, pace / pace[known].mean(), 1.0)
        bounded: Array = np.minimum(np.maximum(need, _LEAST_NEED), _MOST_NEED) ** _NEED_POWER
        return bounded

    def _urgency(self, view: BatchView) -> Array:
        """Return f64 [rows]: what a token of each row counts beside its need."""
        # Behind its target a request counts as the square of how far, ahead of it likewise less.
        behind = self._pace_ms[self._at] / view.tpot_target_ms
        weight = np.minimum(np.maximum(behind**_URGENCY, _LEAST_WEIGHT), _MOST_WEIGHT)
        weight[~np.isfinite(behind)] = 1.0
        weight[self._waited[self._at] >= self.settings.starved_steps] *= _STARVED_WEIGHT
        return weight

    def _block_price_ms(self, view: BatchView) -> float:
        """Return what a drafted token costs for the cache it takes: a token's worth when full."""
        if not view.total_blocks:
            return 0.0
        free = view.free_blocks / view.total_blocks
        return self.core.token_value_ms * max(1.0 - free / _SCARCE_SHARE, 0.0)

    def _keep(self, request_id: Array) -> None:
        """Forget who has left, and make room for who is new."""
        batch = request_id.tobytes()
        if batch == self._batch:
            return
        ids = np.sort(request_id)
        at, known = self._places(ids)
        if not len(self._ids):
            self._pace_ms, self._waited = np.full(len(ids), np.nan), np.zeros(len(ids), np.int32)
        elif not isinstance(known, slice):
            self._pace_ms = np.where(known, self._pace_ms[at], np.nan)
            self._waited = np.where(known, self._waited[at], np.int32(0))
        self._ids, self._batch, self._at = ids, batch, ids.searchsorted(request_id)

    def _places(self, request_id: Array) -> tuple[Array, Array | slice]:
        """Return where requests stand, and which of them are there (else the place is 0)."""
        if request_id.tobytes() == self._batch:
            return self._at, _ALL
        if not len(self._ids):
            return np.zeros(len(request_id), np.intp), np.zeros(len(request_id), bool)
        at = np.minimum(np.searchsorted(self._ids, request_id), len(self._ids) - 1)
        known = self._ids[at] == request_id
        return np.where(known, at, 0), known

    def state(self) -> dict[str, Array]:
        """Return everything that later decisions depend on."""
        own: dict[str, Array] = {
            "ids": self._ids,
            "pace_ms": self._pace_ms,
            "waited": self._waited,
        }
        core = {f"core.{key}": value for key, value in self.core.state().items()}
        parts = {
            "stairs": self.staircase.state(),
            "changes": self.changes.state(self.core.acceptance.task_rows),
        }
        more = {f"{part}.{key}": v for part, of in parts.items() for key, v in of.items()}
        return {**{key: value.copy() for key, value in own.items()}, **core, **more}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        missing = {"ids", "pace_ms", "waited"} - set(state)
        if missing or not len(state["ids"]) == len(state["pace_ms"]) == len(state["waited"]):
            raise ValueError("pilot: the state is incomplete or of another version")
        head = "core."
        self.core.load({k.removeprefix(head): v for k, v in state.items() if k.startswith(head)})
        for head, part in (("stairs.", self.staircase), ("changes.", self.changes)):
            part.load({k.removeprefix(head): v for k, v in state.items() if k.startswith(head)})
        self.core.acceptance.watch = self.changes.note
        self._ids = np.array(state["ids"], np.uint64)
        self._pace_ms = np.array(state["pace_ms"], float)
        self._waited = np.array(state["waited"], np.int32)
        self._batch = None

    def delta(self, since: int) -> dict[str, Array]:
        """Return the acceptance counts gathered since `since`."""
        return self.core.delta(since)

    def merge(self, deltas: list[dict[str, Array]]) -> None:
        """Add other replicas' acceptance counts."""
        self.core.merge(deltas)
