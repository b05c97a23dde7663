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
from typing import Any

from parlay.engine.commit import RECENT_DECAY
from parlay.engine.planner import Planner
from parlay.engine.plugins.counters import Counters
from parlay.engine.plugins.followed import Fitter, Order
from parlay.engine.plugins.hints import speculation_of
from parlay.engine.plugins.outcome import Decision, StepResult, outcome_of, prompts_of
from parlay.engine.plugins.settings import PluginSettings, make_planner, read_settings
from parlay.engine.plugins.tracked import Load, Tracked, view_of
from parlay.engine.request import SpeculationParams
from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits
from parlay.policies.types import (
    NO_BUDGET,
    Array,
    BatchView,
    PlanSource,
)

__all__ = ["Adapter", "Decision", "Load", "StepResult", "Tracked", "view_of"]

log = logging.getLogger("parlay.plugin")
_NEWS = 1.0 - RECENT_DECAY
Report = Callable[[], tuple[Decision, StepResult]]
"""Makes a decision and what became of it, for `Adapter.observe`."""


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
        self._untold: list[Report] = []

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

    def again(self) -> tuple[Order, int] | None:
        """Return the last plan where it serves one step more, and the step's number; else None.

        Then there is no need to `decide`. For batches that read no prompts.
        """
        again = getattr(self.planner, "again", None)
        if again is None or not self._fitter.orders:
            return None
        start_ns = time.perf_counter_ns()
        with self._lock:
            order: Order | None = None
            try:
                plan = again()
                order = None if plan is None else self._fitter.order(plan)
            except Exception as error:
                self._failed("serve again", error)
            if order is not None:
                self.counters.plans[PlanSource.LOCAL] += 1
            self.counters.spent((time.perf_counter_ns() - start_ns) / 1e3)
        return None if order is None else (order, next(self._steps))

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

    def observe_later(self, report: Report) -> None:
        """Hear of a step when the others since the last decision are told: in one go they cost
        less. Until `settle` the counters lack it.
        """  # noqa: D205
        self._untold.append(report)

    def settle(self) -> None:
        """Hear what `observe_later` has kept; call it before a view is made to decide for."""
        untold, self._untold = self._untold, []
        for report in untold:
            self.observe(*report())

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
        prompts = prompts_of(decision, result)
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
