"""Learned hazards and step times, and the plan that emits most tokens per ms: the core of `pilot`.

Optimistic where it knows nothing. A proposer that the plans leave alone is tried again in short
blocks over the whole batch (probing one request at a time teaches too little, for the passes of a
draft model are shared), at growing intervals and within a share of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parlay.policies.acceptance import Acceptance
from parlay.policies.calibration import CALIBRATED, Calibration, calibrated
from parlay.policies.cost import StepTime, behind, padded
from parlay.policies.explore import Explorer
from parlay.policies.policy import EngineLimits, register
from parlay.policies.solver import (
    DWELL_STEPS,
    Allocation,
    StepCosts,
    best_plan,
    no_speculation,
    usable,
)
from parlay.policies.types import (
    DRAFT_MODEL,
    K_LIMIT,
    MEDUSA,
    NGRAM,
    NO_BUDGET,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    Reason,
    StepOutcome,
    StopKind,
    StopRule,
    TaskDefaults,
)

_MARGIN = 0.025
"""Share by which a plan must beat no speculation: the best estimate is too high by selection, by 1
to 3% of the tokens that plans promised in batches of 16 on a CPU."""
_MOST_UNTOLD = 16
_BEST, _NO_GAIN = int(Reason.BEST_GOODPUT), int(Reason.NO_GAIN)
_VERSION = "goodput/1"


@dataclass(slots=True, frozen=True)
class GoodputSettings:
    """k_max: most tokens drafted for one request in a step."""

    k_max: int = 12

    def __post_init__(self) -> None:
        if not 1 <= self.k_max <= K_LIMIT:
            raise ValueError(f"goodput: k_max must be between 1 and {K_LIMIT}, not {self.k_max}")


_Lag = tuple[int, Array, Array]


@register("goodput", GoodputSettings)
class Goodput:
    """Maximises emitted tokens per millisecond of step time; deterministic from its history."""

    name = "goodput"
    learns_late = True
    """A step's outcome may come after the next decision: a sidecar decides first, then learns."""

    def __init__(self, settings: GoodputSettings, limits: EngineLimits) -> None:
        self.limits = limits
        k_max = max(1, min(settings.k_max, limits.k_max))
        self.acceptance = Acceptance(k_max, limits.has(MEDUSA))
        self.calibration = Calibration()
        self.step_time = StepTime()
        self.explorer = Explorer(limits)
        self._ms_per_token, self._last_step = 0.0, 0
        self.expected_gain = 1.0
        # Of the views before the last and last: step, requests, tokens of KV that the draft owed.
        none = (-1, np.zeros(0, np.uint64), np.zeros(0, np.int32))
        self._lags: tuple[_Lag, _Lag] = (none, none)

    def decide(self, view: BatchView) -> Plan:
        """Return the plan for the batch in `view`."""
        return self.weighted(view, np.ones(len(view)), 0.0)

    def weighted(self, view: BatchView, weight: Array, block_price_ms: float) -> Plan:
        """Return the plan where a row's tokens count `weight` f64 [rows] times.

        block_price_ms: what each drafted token costs on top, for the cache it takes.
        """
        rows = self.acceptance.rows_of(view.request_id, view.task, view.output_tokens)
        frailty = self.acceptance.frailty(rows)
        survival = self.acceptance.survival(frailty, view.match_tokens)
        worth = usable(view, survival) * weight[:, None, None]
        costs = self.costs(view, block_price_ms)
        # Rows that still read their prompts count as well: a batch that is filling up is no small
        # one, in which a token would be worth a deep draft.
        emits = max(float(weight.sum()), 1.0)
        none = no_speculation(len(view), emits, costs)
        best = best_plan(worth, costs, emits, self._ms_per_token or None) if len(view) else none
        if best.ms_per_token * (1.0 + _MARGIN) > none.ms_per_token:
            best = none
        self._ms_per_token = best.ms_per_token
        self.expected_gain = none.ms_per_token / best.ms_per_token

        def hopes(tried: int, quiet_steps: int) -> Array:
            least = self.acceptance.least_frailty(rows, frailty, tried, quiet_steps)
            hold = self.acceptance.survival(least, view.match_tokens, tried)
            hoped = worth.copy(order="K")
            hoped[:, tried] = usable(view, hold, tried)[:, 0] * weight[:, None]
            return hoped

        chosen, explored = self.explorer.apply(view, worth, hopes, best, costs)
        self._lags = (self._lags[1], (view.step_id, view.request_id, view.draft_kv_lag))
        return self._plan(view, survival, frailty, chosen, explored, best, costs)

    @property
    def token_value_ms(self) -> float:
        """Return the time that a token of the last plan took: what one is worth."""
        return self._ms_per_token

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from one finished step."""
        self.calibration.observe(outcome)
        self._count(outcome, self.acceptance.observe(outcome, self._doubt(outcome)))

    def observe_all(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn from some finished steps at once, which takes less time."""
        told = [(outcome, self._doubt(outcome)) for outcome in outcomes]
        for outcome, shown in zip(outcomes, self.acceptance.observe_all(told), strict=True):
            self.calibration.observe(outcome)
            self._count(outcome, shown)

    def _count(self, outcome: StepOutcome, shown: Array) -> None:
        """Take a step's times; shown bool [PROPOSERS]: whose drafts it told of."""
        self.step_time.observe(outcome, self._caught_up(outcome))
        # An engine need not tell of every step in which nothing is drafted.
        steps = min(max(outcome.step_id - self._last_step, 1), _MOST_UNTOLD)
        self._last_step = outcome.step_id
        self.explorer.observe(shown, outcome.step_ms, steps)

    def costs(self, view: BatchView, block_price_ms: float = 0.0) -> StepCosts:
        """Return the price list of a step of `view` in which every row of it decodes.

        block_price_ms: see `weighted`.
        """
        rows, prompts = max(len(view), 1), int(view.prefill_tokens.sum())
        decoding = int(np.count_nonzero(view.prefill_tokens == 0))
        fed = max(prompts + decoding, rows)
        # Drafts come on top of the prompts of a step, or in the stead of some, as engines have it:
        # a step that is full of prompts is no reason to draft nothing in.
        most = min(decoding * self.acceptance.k_max, max(self.limits.token_budget - decoding, 0))
        # Prompts take their time whatever is drafted. Counted here they would make a token look
        # worth as much as a step of prompts costs, and every such step draft in vain: they only
        # say where on the curve drafts are verified.
        tokens = np.concatenate(([rows], np.arange(fed, fed + most + 1)))
        ms = self.step_time.verify_ms(padded(tokens, view.bucket_edges), float(view.kv_tokens))
        verify_ms = ms[1:] + (ms[0] - ms[1])
        verify_ms[1:] = np.maximum(self.step_time.markup() * verify_ms[1:], verify_ms[0])
        a_pass, token_ms, catch_up = self.step_time.draft_ms()
        return StepCosts(
            verify_ms,
            a_pass,
            token_ms + block_price_ms,
            behind(view.draft_kv_lag) * (catch_up / DWELL_STEPS),
            self.step_time.pad_ms(),
            self.step_time.heads_ms(),
        )

    def _doubt(self, outcome: StepOutcome) -> Array | None:
        """Return P(reject) f64 [rows] of the place where a confidence ended a draft, else nan.

        None where no draft was ended.
        """
        if len(outcome) == 1 and int(outcome.drafted_k[0]) >= int(outcome.requested_k[0]):
            return None
        place = outcome.drafted_k.astype(np.intp)
        short = (place < outcome.requested_k) & (place < outcome.confidences.shape[1])
        if not short.any():
            return None
        row = np.flatnonzero(short & np.isin(outcome.proposer, CALIBRATED))
        if not len(row):
            return None
        doubt = np.full(len(outcome), np.nan)
        slope, offset = self.calibration.coefficients()[outcome.proposer[row]].T
        doubt[row] = 1.0 - calibrated(outcome.confidences[row, place[row]], slope, offset)
        return doubt

    def _stop_rule(self, best: Allocation) -> StopRule:
        """End a draft where its next token is worth less than its verification costs."""
        if best.ms_per_token <= 0.0 or not self.calibration.trusts(best.proposer):
            return StopRule()
        return StopRule(StopKind.SURVIVAL, min(best.price_ms / best.ms_per_token, 1.0))

    def _caught_up(self, outcome: StepOutcome) -> float:
        """Return how many tokens of KV the draft model caught up in the step."""
        if not outcome.draft_depth:
            return 0.0
        drafts = outcome.proposer == DRAFT_MODEL
        before, last = self._lags
        _, ids, lag = before if before[0] == outcome.step_id else last
        if ids.tobytes() != outcome.request_id.tobytes():
            drafts = np.isin(ids, outcome.request_id[drafts])
        if len(lag) == 1:
            return float(behind(lag)[0]) if drafts[0] else 0.0
        return float(behind(lag[drafts]).sum())

    def _plan(
        self,
        view: BatchView,
        survival: Array,
        frailty: Array,
        chosen: Allocation,
        explored: Array,
        best: Allocation,
        costs: StepCosts,
    ) -> Plan:
        reason = np.where(chosen.k > 0, _BEST, _NO_GAIN).astype(np.uint8)
        if tries := bool(explored.any()):
            reason[explored] = Reason.EXPLORE
        padded = len(view.bucket_edges) > 0
        return Plan(
            request_id=view.request_id,
            proposer=chosen.proposer,
            k=chosen.k.astype(np.int16),
            shadow=np.zeros(len(view), bool),
            propensity=np.ones(len(view), np.float32),
            reason=reason,
            survival=survival,
            match_hazard=self.acceptance.match_hazard(),
            match_frailty=frailty[:, NGRAM].astype(np.float32),
            defaults=_defaults(view, chosen),
            token_value_ms=best.ms_per_token,
            marginal_token_price_ms=best.price_ms,
            draft_token_price_ms=costs.token_ms.astype(np.float32),
            budget_tokens=int(chosen.k.sum()) if padded else NO_BUDGET,
            # Where steps are padded a rule saves little of what they cost, and a device whose
            # passes are recorded would have to be waited for at every place.
            stop_rule=StopRule() if tries or padded else self._stop_rule(best),
            calibration=self.calibration.coefficients(),
            step_id=view.step_id,
            state_version=self.acceptance.version,
            policy_version=_VERSION,
        )

    def state(self) -> dict[str, Array]:
        """Return everything that later decisions depend on."""
        parts = {
            "acceptance": self.acceptance.state(),
            "cost": self.step_time.state(),
            "explore": self.explorer.state(),
            "calibration": self.calibration.state(),
        }
        flat = {f"{part}.{key}": value for part, of in parts.items() for key, value in of.items()}
        flat["ms_per_token"] = np.asarray(self._ms_per_token)
        flat["expected_gain"] = np.asarray(self.expected_gain)
        flat["last_step"] = np.asarray(self._last_step)
        _, flat["lag.request_id"], flat["lag.tokens"] = self._lags[1]
        return flat

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        missing = set(self.state()) - set(state)
        if missing:
            raise ValueError(f"goodput: the state lacks {', '.join(sorted(missing)[:3])}")
        for part, owner in (
            ("acceptance", self.acceptance),
            ("cost", self.step_time),
            ("explore", self.explorer),
            ("calibration", self.calibration),
        ):
            head = f"{part}."
            owner.load({k.removeprefix(head): v for k, v in state.items() if k.startswith(head)})
        self._ms_per_token = float(state["ms_per_token"])
        self._last_step = int(state["last_step"])
        self.expected_gain = float(state["expected_gain"])
        last = (-1, state["lag.request_id"].copy(), state["lag.tokens"].copy())
        self._lags = (last, last)

    def delta(self, since: int) -> dict[str, Array]:
        """Return the acceptance counts gathered since `since`; step times stay at home."""
        return self.acceptance.delta(since)

    def merge(self, deltas: list[dict[str, Array]]) -> None:
        """Add other replicas' acceptance counts."""
        self.acceptance.merge(deltas)


def _defaults(view: BatchView, chosen: Allocation) -> TaskDefaults:
    """Return what most rows of each task do, and under task 0 what most rows of all do."""
    if len(view) == 1 and not view.prefill_tokens[0]:
        tasks = np.array(sorted({0, int(view.task[0])}), np.uint32)
        alike = np.zeros(len(tasks), np.intp)
        return TaskDefaults(tasks, chosen.proposer[alike], chosen.k[alike].astype(np.int16))
    decodes = view.prefill_tokens == 0
    task, proposer, k = view.task, chosen.proposer, chosen.k
    if not decodes.all():
        task, proposer, k = task[decodes], proposer[decodes], k[decodes]
    tasks = np.array(sorted({0, *task.tolist()}), np.uint32)
    cell = (tasks.searchsorted(task) * PROPOSERS + proposer) * (K_LIMIT + 1) + k
    counts = np.bincount(cell, minlength=len(tasks) * PROPOSERS * (K_LIMIT + 1))
    counts = counts.reshape(len(tasks), -1)
    counts[0] = counts.sum(axis=0)
    proposer, k = np.divmod(counts.argmax(axis=1), K_LIMIT + 1)
    return TaskDefaults(task=tasks, proposer=proposer.astype(np.uint8), k=k.astype(np.int16))
