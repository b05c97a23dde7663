"""The controller without its wire: one policy for each engine, kept as long as the process lives.

Pure: structs in, structs out. Whoever calls it does so from one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from itertools import count
from time import perf_counter

from parlay.controller.heard import HeardStep
from parlay.controller.learned_states import Snapshot
from parlay.controller.lifecycle import Lifecycle
from parlay.controller.observatory import Observatory
from parlay.controller.session import Counts, Session, spec_of
from parlay.controller.standing import UnknownEngine
from parlay.policies.types import BatchView, Plan, StepOutcome
from parlay.protos.codec import (
    PROTOCOL_VERSION,
    HalfReport,
    Hello,
    StepReport,
    Unread,
    Welcome,
)

__all__ = ["Counts", "Full", "Host", "Session", "Superseded", "UnknownEngine", "UnknownVersion"]

MAX_SESSIONS = 256
"""Engines remembered; the one that left longest ago makes room for a new one."""
_REPLACED = -1


class UnknownVersion(ValueError):
    """The engine speaks a protocol version that is not spoken here."""


class Superseded(ValueError):
    """Another stream said hello with this engine's id."""


class Full(ValueError):
    """Every remembered engine is connected."""


class Host:
    """Keeps a session for each engine; raises ValueError where policy or settings are unknown.

    keep: gets every step whose view and outcome were heard; it must not raise nor take long.
    warm: what engines that are new start from. watch: is told of every decision and outcome. late:
    where the policy allows it, what a report tells is learned once its plan is out.
    """

    def __init__(
        self,
        policy: str,
        settings: Mapping[str, str] | None = None,
        keep: Callable[[HeardStep], None] | None = None,
        warm: Snapshot | None = None,
        watch: Observatory | None = None,
        late: bool = False,
    ) -> None:
        self.keep, self.warm, self.watch, self.late = keep, warm, watch, late
        self.sessions: dict[str, Session] = {}
        self.lifecycle = Lifecycle(spec_of(policy, settings), self.sessions)
        self._streams = count(1)

    @property
    def policy(self) -> str:
        """Name of the policy that is active, engines with one of their own left out."""
        return self.lifecycle.standing.spec.name

    def new_stream(self) -> int:
        """Return a number for a stream, to pass to `hello`."""
        return next(self._streams)

    def hello(self, hello: Hello, stream: int = 0) -> tuple[Session, Welcome]:
        """Open or resume the engine's session; stream 0 (unary calls) takes over from nobody."""
        if hello.protocol_version != PROTOCOL_VERSION:
            raise UnknownVersion(
                f"protocol version {hello.protocol_version} is not spoken here, only"
                f" {PROTOCOL_VERSION}: run an engine and a controller of the same release"
            )
        session = self.sessions.get(hello.engine_id)
        if session is not None and session.stream > 0 and not stream:
            _check_same(session, hello)
        self.sessions.pop(hello.engine_id, None)
        resumed = session is not None and session.limits == hello.limits
        if session is None or not resumed:
            if session is not None:
                session.stream = _REPLACED
            self._make_room()
            session = self._new(hello)
        self.sessions[hello.engine_id] = session
        if not resumed:
            self.lifecycle.join(session)
        if session.run_id != hello.run_id:
            session.restart(hello.run_id)
        elif stream:
            # A view whose step id came damaged must not silence every stream that follows.
            session.last_view = -1
        session.stream, session.ended = stream or session.stream, False
        session.counts.hellos += 1
        last = session.last_outcome if session.last_outcome >= 0 else None
        return session, Welcome(session.spec.name, resumed, last)

    def report(self, session: Session, stream: int, report: StepReport | HalfReport) -> Plan | None:
        """Decide on the view, None: there is nothing to decide, and learn from the outcome.

        Learns first, or, where that may wait, in `settle`, which is called once the plan is out.
        Raises ValueError where the outcome is malformed, and another stream has not taken over.
        """
        if session.stream != stream:
            raise Superseded("another stream said hello with this engine id")
        outcome, view = report.outcome, report.view
        if outcome is not None:
            waits = view is not None and self._may_wait(session, outcome.step_id)
            if isinstance(outcome, Unread) and not waits:
                outcome = outcome.read()
            if self._counts(session, outcome.step_id):
                session.put_off = outcome
                if not waits:
                    self.settle(session)
        return None if view is None else self._decided(session, view)

    def settle(self, session: Session) -> None:
        """Learn from what was put off, if anything was; raises ValueError where it is malformed."""
        outcome, session.put_off = session.put_off, None
        if isinstance(outcome, Unread):
            try:
                outcome = outcome.read()
            except ValueError:
                session.counts.outcomes -= 1
                session.counts.ignored_outcomes += 1
                raise
        if outcome is not None:
            self._learn(session, outcome)

    def observe(self, session: Session, outcome: StepOutcome) -> bool:
        """Learn from an outcome once; False where it is repeated or out of order."""
        new = self._counts(session, outcome.step_id)
        if new:
            self._learn(session, outcome)
        return new

    def decide(self, session: Session, view: BatchView) -> Plan | None:
        """Return a plan for a view that is newer than the last; None for any other."""
        self._settle_before(session)
        return self._decided(session, view)

    def _settle_before(self, session: Session) -> None:
        """Settle on behalf of who did not send it: that it is malformed is counted, not raised."""
        with contextlib.suppress(ValueError):
            self.settle(session)

    def _counts(self, session: Session, step_id: int) -> bool:
        """Say whether an outcome is new, and count it."""
        self._settle_before(session)
        new = step_id > session.last_outcome
        if new:
            session.last_outcome = step_id
            session.counts.outcomes += 1
        else:
            session.counts.ignored_outcomes += 1
        return new

    def _may_wait(self, session: Session, step_id: int) -> bool:
        """Say whether learning may come after the decision: only of a step that was decided."""
        return (
            self.late
            and step_id == session.last_view
            and not session.trials
            and bool(getattr(session.policy, "learns_late", False))
        )

    def _learn(self, session: Session, outcome: StepOutcome) -> None:
        step = None
        if self.keep is not None or session.trials:
            step = session.waiting.step_of(session.engine_id, outcome)
            if step is not None and self.keep is not None:
                self.keep(step)
        try:
            if session.trials:
                self.lifecycle.observe(session, outcome, step)
            else:
                session.policy.observe(outcome)
        except Exception as error:
            self.lifecycle.fell(session, error)
        if self.watch is not None:
            self.watch.observed(session, outcome)

    def _decided(self, session: Session, view: BatchView) -> Plan | None:
        if view.step_id <= session.last_view:
            session.counts.ignored_views += 1
            return None
        session.last_view = view.step_id
        session.counts.plans += 1
        start_s = perf_counter()
        try:
            plan = self._planned(session, view)
        except Exception as error:
            self.lifecycle.fell(session, error)
            plan = self._planned(session, view)
        session.state_version = plan.state_version
        if self.keep is not None or session.trials:
            session.waiting.decided(view, plan)
        if self.watch is not None:
            self.watch.decided(session, view, plan, perf_counter() - start_s)
        return plan

    def session(self, engine_id: str) -> Session:
        """Return the session of an engine that has said hello; raises UnknownEngine."""
        session = self.sessions.get(engine_id)
        if session is None:
            raise UnknownEngine(f"engine '{engine_id}' has not said hello")
        return session

    def leave(self, session: Session, stream: int) -> None:
        """Note that a stream has ended; what was learned stays."""
        self._settle_before(session)
        if session.stream == stream:
            session.stream, session.ended = 0, True

    def _planned(self, session: Session, view: BatchView) -> Plan:
        if session.trials:
            return self.lifecycle.decide(session, view)
        return session.policy.decide(view)

    def _new(self, hello: Hello) -> Session:
        """Return a session of the active policy, started from the snapshot where one fits."""
        spec = self.lifecycle.standing.of(hello.engine_id)
        policy = spec.make(hello.limits)
        if self.warm is not None:
            policy = self.warm.warmed(policy, spec, hello.limits, hello.engine_id)
        return Session(policy, hello.limits, hello.run_id, engine_id=hello.engine_id, spec=spec)

    def _make_room(self) -> None:
        if len(self.sessions) < MAX_SESSIONS:
            return
        oldest = next((i for i, s in self.sessions.items() if not s.stream), None)
        if oldest is None:
            raise Full(f"{MAX_SESSIONS} engines are connected, which is the most at a time")
        del self.sessions[oldest]


def _check_same(session: Session, hello: Hello) -> None:
    """Raise ValueError where a unary call would end what an open stream is steered by."""
    if session.limits != hello.limits or session.run_id != hello.run_id:
        raise ValueError(
            f"engine '{hello.engine_id}' is steered on a stream, in another run or with other"
            " limits: call with an engine_id of your own"
        )
