"""What the sidecar's decisions look like from outside: fed step by step, read by page and metrics.

Taking a decision or an outcome only puts it aside; `fold` adds up what waits, and is called by a
timer and by whoever reads. Whoever calls any of it does so from one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from parlay.controller.history import ROWS_OF, History
from parlay.controller.tally import Tally, tally_of
from parlay.policies.guard import Guard
from parlay.policies.types import Array, BatchView, Plan, PlanSource, StepOutcome

if TYPE_CHECKING:
    from parlay.controller.session import Session

MOST_ENGINES = 256
PROBE = "parlay-doctor"
"""Who asks for a plan by this name is no engine, and is not shown as one."""
MOST_WAITING = 1024
"""Steps put aside before they are added up whether or not the timer has come round."""
KEPT_PLANS = 64
SPARSE_STEPS = 16
"""Of decisions older than the newest KEPT_PLANS, one in so many is kept, as many again."""
MEMORY_S = 30.0
"""What is shown as recent weighs a third after so long."""


class Unknown(ValueError):
    """What was asked for was not heard of, or not kept."""


@dataclass(slots=True, frozen=True)
class Decision:
    """One plan and what it was made from; gain: expected over no speculation, nan not said.

    Its arrays are written no more. at_s: unix time.
    """

    view: BatchView
    plan: Plan
    gain: float
    at_s: float


@dataclass(slots=True)
class EngineSeen:
    """One engine: sums since the start (total) and of late (recent), history, newest decisions."""

    session: Session
    total: Tally = field(default_factory=Tally)
    recent: Tally = field(default_factory=Tally)
    history: History = field(default_factory=History)
    newest: deque[Decision] = field(default_factory=lambda: deque(maxlen=KEPT_PLANS))
    sparse: deque[Decision] = field(default_factory=lambda: deque(maxlen=KEPT_PLANS))
    heard_s: float = 0.0
    folded_s: float = 0.0
    decided: int = 0

    @property
    def guard(self) -> Guard | None:
        """Return the guard around the engine's policy, if there is one."""
        return self.session.policy if isinstance(self.session.policy, Guard) else None

    def decision_of(self, request_id: int) -> Decision | None:
        """Return the newest decision kept of a request."""
        for decision in chain(reversed(self.newest), reversed(self.sparse)):
            if request_id in decision.view.request_id:
                return decision
        return None


class Observatory:
    """Watches every engine's decisions and outcomes; clock: unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.engines: dict[str, EngineSeen] = {}
        self.clock = clock
        self.started_s = clock()
        self._decided: list[tuple[Session, BatchView, Plan, float, float, float]] = []
        self._observed: list[tuple[Session, StepOutcome, float]] = []

    def decided(self, session: Session, view: BatchView, plan: Plan, took_s: float = 0.0) -> None:
        """Put a decision aside, which took `took_s` to make."""
        if session.engine_id == PROBE:
            return
        policy = session.policy
        gain = getattr(getattr(policy, "policy", policy), "expected_gain", np.nan)
        self._decided.append((session, view, plan, took_s, gain, self.clock()))
        if len(self._decided) >= MOST_WAITING:
            self.fold()

    def observed(self, session: Session, outcome: StepOutcome) -> None:
        """Put an outcome aside."""
        if session.engine_id == PROBE:
            return
        self._observed.append((session, outcome, self.clock()))
        if len(self._observed) >= MOST_WAITING:
            self.fold()

    def fold(self) -> None:
        """Add up what was put aside."""
        decided, self._decided = self._decided, []
        observed, self._observed = self._observed, []
        waiting: dict[str, _Waiting] = {}
        for session, view, plan, took_s, gain, at_s in decided:
            # A guard that is off does not ask its policy, whose last word is of another step.
            now = gain if plan.k.any() else (1.0 if gain == gain else gain)
            mine = waiting.setdefault(session.engine_id, _Waiting(session))
            mine.decided.append((Decision(view, plan, now, at_s), took_s))
        for session, outcome, at_s in observed:
            mine = waiting.setdefault(session.engine_id, _Waiting(session))
            mine.outcomes.append((outcome, at_s))
        now_s = self.clock()
        for engine_id, mine in waiting.items():
            _fold(self._engine(engine_id, mine.session), mine, now_s)

    def _engine(self, engine_id: str, session: Session) -> EngineSeen:
        seen = self.engines.get(engine_id)
        if seen is None:
            if len(self.engines) >= MOST_ENGINES:
                del self.engines[min(self.engines, key=lambda e: self.engines[e].heard_s)]
            seen = self.engines[engine_id] = EngineSeen(session)
        seen.session = session
        return seen


@dataclass(slots=True)
class _Waiting:
    session: Session
    decided: list[tuple[Decision, float]] = field(default_factory=list)
    outcomes: list[tuple[StepOutcome, float]] = field(default_factory=list)


def _fold(seen: EngineSeen, mine: _Waiting, now_s: float) -> None:
    plans = {d.plan.step_id: d.plan for d in seen.newest}
    plans |= {d.plan.step_id: d.plan for d, _ in mine.decided}
    added = tally_of(
        [(d.view, d.plan, took_s) for d, took_s in mine.decided],
        [outcome for outcome, _ in mine.outcomes],
        plans,
    )
    seen.total.add(added)
    seen.recent.add(added, keep=float(np.exp(-max(now_s - seen.folded_s, 0.0) / MEMORY_S)))
    seen.folded_s = now_s
    for decision, _ in mine.decided:
        if seen.decided % SPARSE_STEPS == 0:
            seen.sparse.append(decision)
        seen.decided += 1
        seen.newest.append(decision)
    _add_history(seen, mine)


def _add_history(seen: EngineSeen, mine: _Waiting) -> None:
    if mine.decided:
        at_s = np.array([d.at_s for d, _ in mine.decided])
        gain = np.array([d.gain for d, _ in mine.decided], float)
        said = np.isfinite(gain)
        seen.history.add(at_s, {"gain": np.where(said, gain, 0.0), "gains": said})
        seen.heard_s = float(at_s[-1])
    if mine.outcomes:
        at_s = np.array([at for _, at in mine.outcomes])
        seen.history.add(at_s, _history_of(seen, [outcome for outcome, _ in mine.outcomes]))
        seen.heard_s = max(seen.heard_s, float(at_s[-1]))


def _history_of(seen: EngineSeen, outcomes: list[StepOutcome]) -> dict[str, Array]:
    """Return the outcomes' values [n] by field."""
    count, rows = len(outcomes), np.array([len(outcome) for outcome in outcomes])
    of = np.repeat(np.arange(count), rows)

    def by_step(weight: Array) -> Array:
        return np.bincount(of, weight, minlength=count)

    emitted = np.concatenate([outcome.emitted for outcome in outcomes])
    proposer = np.concatenate([outcome.proposer for outcome in outcomes])
    source = np.concatenate([outcome.plan_source for outcome in outcomes])
    step_ms = np.array([outcome.step_ms for outcome in outcomes], float)
    view = seen.newest[-1].view if seen.newest else None
    report = seen.guard.report() if seen.guard is not None else None
    named = {name: by_step((proposer == p) & (emitted > 0)) for p, name in enumerate(ROWS_OF)}
    return named | {
        "steps": np.ones(count),
        "emitted": by_step(emitted),
        "step_ms": np.where(np.isfinite(step_ms), step_ms, 0.0),
        "running": rows if view is None else np.full(count, view.running),
        "waiting": np.full(count, 0 if view is None else view.waiting),
        "guard_gain": np.full(count, np.nan if report is None else report.gain),
        "fallbacks": by_step(source != PlanSource.REMOTE),
        "all_rows": rows,
    }
