"""Between an engine and what decides for it: a view in, a fitted plan out, outcomes in.

Everything that plugins share is here; a plugin adds what its engine differs in. Nothing in here
can fail a step of the engine: where the policy raises, nobody speculates. Free of torch.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlay.engine.commit import RECENT_DECAY
from parlay.engine.planner import Planner
from parlay.engine.plugins.counters import Counters
from parlay.engine.plugins.fitting import every_row
from parlay.engine.plugins.followed import Fitter
from parlay.engine.plugins.hints import speculation_of
from parlay.engine.plugins.settings import PluginSettings, make_planner, read_settings
from parlay.engine.plugins.tracked import Load, Tracked, view_of
from parlay.engine.request import SpeculationParams
from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits
from parlay.policies.types import (
    NO_BUDGET,
    PROPOSERS,
    Array,
    BatchView,
    Fitted,
    Plan,
    PlanSource,
    ShadowRows,
    StepOutcome,
    no_shadows,
)

__all__ = ["Adapter", "Decision", "Load", "StepResult", "Tracked", "view_of"]

log = logging.getLogger("parlay.plugin")
_DEFAULT = int(PlanSource.DEFAULT)
_NEWS = 1.0 - RECENT_DECAY
Counts = Array | list[int]


@dataclass(slots=True, frozen=True)
class Decision:
    """What a step is to do, by row of its view: fit.proposer, fit.k. Give it back to `observe`."""

    view: BatchView
    plan: Plan | None
    source: PlanSource
    fit: Fitted


@dataclass(slots=True)
class StepResult:
    """What a step did, by row of the decision's view; a row that did not run has zeros.

    drafted, accepted (before end or stop cropped it) and emitted tokens, as lists or arrays;
    verified, None where all that was drafted was; truncated_by as in StepOutcome; confidences
    f32 [rows, K]. draft_ms f32 [PROPOSERS], draft_depth, verify_ms and step_ms as in StepOutcome;
    padded_tokens, 0 where the pass had no rows but those of the batch; prefill_tokens, None where
    they are those of the view.
    """

    drafted: Counts
    accepted: Counts
    emitted: Counts
    verified: Counts | None = None
    truncated_by: Array | None = None
    confidences: Array | None = None
    shadow: ShadowRows = field(default_factory=no_shadows)
    draft_ms: Array | list[float] = field(default_factory=lambda: [0.0] * PROPOSERS)
    draft_depth: int = 0
    verify_ms: float = 0.0
    step_ms: float = 0.0
    padded_tokens: int = 0
    prefill_tokens: int | None = None


class Adapter:
    """Steers one engine; several threads may call it, each with steps of its own.

    engine: its kind, for logs and the sidecar. limits: what it can do. settings: None reads the
    environment. planner: decides instead of what the settings say. Raises ValueError where the
    settings make no sense.
    """

    def __init__(
        self,
        engine: str,
        limits: EngineLimits,
        settings: PluginSettings | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.engine, self.limits = engine, limits
        self.planner = planner or make_planner(settings or read_settings(), engine, limits)
        self.counters = Counters()
        self._fitter = Fitter()
        self._requests: dict[int, Tracked] = {}
        self._ids, self._steps = itertools.count(1), itertools.count()
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def add(self, speculation: SpeculationParams | None = None) -> Tracked:
        """Take on a request."""
        tracked = Tracked(next(self._ids), speculation or SpeculationParams())
        with self._lock:
            self._requests[tracked.request_id] = tracked
        return tracked

    def add_hinted(self, hints: Mapping[str, Any] | None, prefix: str = "parlay_") -> Tracked:
        """Take on a request with hints from outside; those that make no sense are left aside."""
        try:
            return self.add(speculation_of(hints, prefix))
        except ValueError as error:
            self.fallback("hints left aside", f": {error}")
            return self.add()

    def forget(self, tracked: Tracked) -> None:
        """Let go of a request that has ended."""
        with self._lock:
            self._requests.pop(tracked.request_id, None)

    def decide(self, view: BatchView) -> Decision:
        """Return what the coming step is to do; numbers the view's step."""
        start_ns = time.perf_counter_ns()
        with self._lock:
            view.step_id = next(self._steps)
            try:
                plan, source = self._timed(self.planner.plan, view)
                fit = self._fitter.fit(plan, view)
            except Exception as error:
                self._failed("decide", error)
                plan, source, fit = None, PlanSource.DEFAULT, fit_plan(None, view)
            self.counters.plans[PlanSource.DEFAULT if plan is None else source] += 1
            self.counters.spent((time.perf_counter_ns() - start_ns) / 1e3)
        return Decision(view, plan, source, fit)

    def verify_k(self, decision: Decision, drafted: Array, confidences: Array | None) -> Array:
        """Return how many of each row's drafts to verify, i32 [rows]: the plan's budget may bind.

        drafted i32 [rows]; confidences f32 [rows, K], made before each token was drawn.
        """
        plan = decision.plan
        if plan is None or plan.budget_tokens == NO_BUDGET or not drafted.any():
            return drafted
        start_ns = time.perf_counter_ns()
        with self._lock:
            try:
                drafted = fit_plan(plan, decision.view, drafted, confidences).verify_k
            except Exception as error:
                self._failed("fit its budget", error)
            self.counters.spent((time.perf_counter_ns() - start_ns) / 1e3)
        return drafted

    def observe(self, decision: Decision, result: StepResult) -> None:
        """Hear what became of a decision; steps may overlap, each is told once, in order."""
        start_ns = time.perf_counter_ns()
        with self._lock:
            self._keep(decision, result)
            try:
                self._timed(functools.partial(self._tell, decision), result)
            except Exception as error:
                self._failed("observe", error)
            self.counters.spent((time.perf_counter_ns() - start_ns) / 1e3)

    def fallback(self, reason: str, detail: str = "") -> None:
        """Count that the engine goes its own way, for one of few reasons; say each once."""
        with self._lock:
            self.counters.fallbacks[reason] += 1
            self._say(reason, f"{reason}{detail}")

    def close(self) -> None:
        """Let go of threads and sockets."""
        self.planner.close()

    def _tell(self, decision: Decision, result: StepResult) -> None:
        """Tell the planner of a step, or let it ask when it wants to know."""
        later = getattr(self.planner, "observe_later", None)
        if later is None:
            self.planner.observe(outcome_of(decision, result))
            return
        prompts = _prompts_of(decision, result)
        later(functools.partial(outcome_of, decision, result), result.step_ms, prompts)

    def _keep(self, decision: Decision, result: StepResult) -> None:
        """Count a step, of all and of each request."""
        requests, counters = self._requests, self.counters
        counters.steps += 1
        columns = (
            *(decision.view.request_id, decision.fit.proposer),
            *(result.emitted, result.drafted, result.accepted),
        )
        for request_id, proposer, emitted, drafted, accepted in zip(
            *(c if isinstance(c, list) else c.tolist() for c in columns), strict=True
        ):
            if drafted:
                counters.add(proposer, drafted, accepted)
            if emitted:
                counters.emitted += emitted
                request = requests.get(request_id)
                if request is not None:
                    request.steps += 1
                    request.drafted += drafted
                    request.accepted += accepted
                    request.recent_accept += _NEWS * (emitted - request.recent_accept)

    def _timed(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """Call the planner, and count what that took."""
        start_ns = time.perf_counter_ns()
        try:
            return call(argument)
        finally:
            self.counters.policy_us += (time.perf_counter_ns() - start_ns) / 1e3

    def _failed(self, what: str, error: Exception) -> None:
        self.counters.errors += 1
        self._say(what, f"the policy failed to {what}, nobody speculates: {error!r}")

    def _say(self, topic: str, line: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning("%s: %s", self.engine, line)


def outcome_of(decision: Decision, result: StepResult) -> StepOutcome:
    """Return what the policy is told of a step."""
    view, fit = decision.view, decision.fit
    drafted = np.asarray(result.drafted, np.int16)
    verified = drafted if result.verified is None else np.asarray(result.verified, np.int16)
    rows, cut, seen = len(view), result.truncated_by, result.confidences
    return StepOutcome(
        request_id=view.request_id,
        task=view.task,
        proposer=fit.proposer,
        requested_k=fit.k.astype(np.int16),
        drafted_k=drafted,
        verified_k=verified,
        accepted=np.asarray(result.accepted, np.int16),
        emitted=np.asarray(result.emitted, np.int16),
        match_tokens=view.match_tokens,
        truncated_by=_same(rows, 0) if cut is None else np.asarray(cut, np.uint8),
        plan_source=_sources(fit, int(decision.source)),
        plan_step_id=np.array([decision.plan.step_id if decision.plan else 0] * rows, np.uint64),
        confidences=_blank(rows, max([1, *drafted.tolist()])) if seen is None else seen,
        shadow=result.shadow,
        step_id=view.step_id,
        padded_tokens=result.padded_tokens
        or int(np.maximum(view.prefill_tokens, 1).sum() + verified.sum()),
        prefill_tokens=_prompts_of(decision, result),
        kv_tokens=view.kv_tokens,
        draft_ms=np.asarray(result.draft_ms, np.float32),
        draft_depth=result.draft_depth,
        verify_ms=result.verify_ms,
        step_ms=result.step_ms,
    )


def _prompts_of(decision: Decision, result: StepResult) -> int:
    told = result.prefill_tokens
    return int(decision.view.prefill_tokens.sum()) if told is None else told


def _sources(fit: Fitted, source: int) -> Array:
    """Return where each row's plan came from, u8 [rows]."""
    if fit.follows is every_row(len(fit.follows)):
        return _same(len(fit.follows), source)
    return np.where(fit.follows, source, _DEFAULT).astype(np.uint8)


@functools.lru_cache(maxsize=1024)
def _same(rows: int, value: int) -> Array:
    """Return one value for every row, u8 [rows], for everybody to read."""
    same = np.full(rows, value, np.uint8)
    same.flags.writeable = False
    return same


@functools.lru_cache(maxsize=256)
def _blank(rows: int, depth: int) -> Array:
    """Return confidences that nobody told, f32 [rows, depth], for everybody to read."""
    blank = np.full((rows, depth), np.nan, np.float32)
    blank.flags.writeable = False
    return blank
