"""Plans from a sidecar, without ever waiting for it: the engine's end of the stream.

The engine's thread puts (last outcome, view) on a queue and takes whatever plan came last. gRPC's
writer thread encodes and sends; one thread of ours reads plans and reconnects; another ends calls
that have gone silent. Where no plan is fresh enough a planner in this process decides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from parlay.engine.address import check_address
from parlay.engine.outbox import Outbox, Report
from parlay.engine.planner import Planner
from parlay.engine.quiet import Quiet
from parlay.engine.remote_call import SILENCE_S, Call
from parlay.engine.remote_stats import RemoteStats
from parlay.policies.policy import EngineLimits
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome
from parlay.protos import codec
from parlay.protos.credentials import Credentials, from_environment

__all__ = ["EngineInfo", "RemotePlanner", "RemoteStats"]

BACKOFF_S = (0.05, 1.0)
SUPERSEDED_S = 5.0
"""How long to leave a sidecar to another engine of our id: who comes back at once fights it."""
SYNCHRONOUS_S = 5.0
CLOSE_S = 1.0
OPTIONS = (
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel is to try at once, not when an older one's back-off allows.
    ("grpc.use_local_subchannel_pool", 1),
)
log = logging.getLogger("parlay.remote")


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """Who the engine says it is: a name that outlives restarts, and what it can do."""

    engine_id: str
    limits: EngineLimits = field(default_factory=EngineLimits)

    def __post_init__(self) -> None:
        if not 0 < len(self.engine_id.encode()) <= codec.MAX_ID_BYTES:
            raise ValueError(f"engine_id must have 1 to {codec.MAX_ID_BYTES} bytes")


class RemotePlanner:
    """A Planner that asks the sidecar at `target` (unix:/path or host:port); `fallback` stands in.

    A plan is computed from the view of one step and used from the next one on. Views and outcomes
    are encoded later, on another thread: whoever passes them does not write to their arrays again.
    synchronous waits for the plan of this very step (for tests: decides as a local policy would).
    credentials: None takes those of PARLAY_SIDECAR_*. Raises ValueError where `target` can be no
    address, or must not be sent a token.
    """

    def __init__(
        self,
        target: str,
        info: EngineInfo,
        fallback: Planner,
        synchronous: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        check_address(target)
        self._credentials = credentials or from_environment("PARLAY_SIDECAR")
        self._credentials.check(target)
        self.stats = RemoteStats()
        self._target, self._info, self._fallback = target, info, fallback
        self._outbox = Outbox()
        self._plans: queue.SimpleQueue[Plan] | None = queue.SimpleQueue() if synchronous else None
        self._plan: Plan | None = None
        self._outcome: StepOutcome | None = None
        self._last_step = -1
        self._quiet, self._reports_at = Quiet(), (-1, -1)
        self._run = int.from_bytes(os.urandom(7), "little")
        self._astray = False
        self._call: Call | None = None
        self._known = False
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._stay_connected, name="parlay-remote", daemon=True),
            threading.Thread(target=self._watch, name="parlay-remote-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Send this step's report; return the newest plan, the fallback's if it is old."""
        start = time.perf_counter_ns()
        if view.step_id <= self._last_step or self._astray:
            self._flush()
            self._run, self._plan, self._quiet = self._run + 1, None, Quiet()
            self._astray = False
        self._last_step = view.step_id
        self._report(view)
        plan = self._plan if self._plans is None else self._wait(view.step_id, self._plans)
        age = -1 if plan is None else view.step_id - plan.step_id
        self.stats.engine_thread_us.append((time.perf_counter_ns() - start) / 1e3)
        if plan is not None and 0 <= age <= plan.expires_after_steps:
            self.stats.plans_remote += 1
            self.stats.late_steps += plan.step_id < self._reports_at[0]
            return plan, PlanSource.REMOTE
        self.stats.plans_local += 1
        return self._fallback.plan(view)[0], PlanSource.LOCAL

    def observe(self, outcome: StepOutcome) -> None:
        """Keep the outcome for the next report; the fallback hears it too."""
        self._flush()
        self._outcome = outcome
        self._fallback.observe(outcome)

    @property
    def connected(self) -> bool:
        """Say whether the sidecar has welcomed us on the stream that is open."""
        return (call := self._call) is not None and call.open and call.welcomed

    def close(self) -> None:
        """Send the last outcome, leave in good order, and let go; takes a few seconds at most."""
        if self._closing.is_set():
            return
        self._flush()
        self._closing.set()
        self._outbox.wake()
        self._threads[0].join(CLOSE_S)
        if (call := self._call) is not None:
            call.cancel()
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._fallback.close()

    def _report(self, view: BatchView) -> None:
        """Send what became of the last step and what the next one is, or hold it back."""
        outcome, self._outcome = self._outcome, None
        if self._plans is None and self._quiet.holds(outcome, view, self._plan):
            return
        self._reports_at = (self._reports_at[1], view.step_id)
        self._put(self._quiet.sent(outcome, view), view)

    def _flush(self) -> None:
        """Send an outcome that no view has followed."""
        if self._outcome is not None:
            self._put(self._outcome, None)
            self._outcome = None

    def _put(self, outcome: StepOutcome | None, view: BatchView | None) -> None:
        self.stats.dropped_reports += self._outbox.put(Report(self._run, outcome, view))

    def _wait(self, step_id: int, plans: queue.SimpleQueue[Plan]) -> Plan | None:
        with contextlib.suppress(queue.Empty):
            while (plan := plans.get(timeout=SYNCHRONOUS_S)).step_id < step_id:
                pass
            return plan
        return None

    def _stay_connected(self) -> None:
        """Keep a stream open until closed; runs in a thread of its own."""
        backoff_s = BACKOFF_S[0]
        while not self._closing.is_set():
            call = self._call = Call()
            kind, error = self._talk(call)
            self._hang_up(call)
            if self._closing.is_set():
                break
            self.stats.endings[kind] += 1
            if not self.stats.last_error:
                log.warning("no sidecar target=%s error=%r", self._target, error)
            self.stats.last_error = error
            backoff_s = BACKOFF_S[0] if call.steered else min(2 * backoff_s, BACKOFF_S[1])
            wait_s = SUPERSEDED_S if call.superseded else backoff_s
            self._closing.wait(wait_s * random.uniform(0.5, 1.0))

    def _talk(self, call: Call) -> tuple[str, str]:
        """Open one stream and read it to its end; return in what way it ended, and why."""
        requests: Any = call.writing(self._write(call))
        try:
            said = self._credentials.metadata()
            call.channel = self._credentials.channel(self._target, OPTIONS)
        except (OSError, ValueError) as error:
            return "credentials", f"credentials: {error}"
        try:
            call.stream = call.channel.stream_stream(codec.STEER)(requests, metadata=said)
            for data in call.stream:
                call.asked_s = None
                self._read(call, codec.decode_response(data))
        except grpc.RpcError:
            code = call.stream.code()
            call.superseded = code is grpc.StatusCode.ABORTED
            if call.silent():
                return "silent", f"no answer within {SILENCE_S:g} s"
            return code.name.lower(), f"{code.name}: {call.stream.details()}"
        except ValueError as error:
            return "refused", f"answer refused: {error}"
        except Exception as error:
            # Whatever it is, it must not end the thread that comes back.
            log.exception("the stream failed target=%s", self._target)
            return "failed", f"{type(error).__name__}: {error}"
        if call.draining:
            return "draining", "the sidecar is draining"
        return "ended", "the stream has ended"

    def _read(self, call: Call, response: codec.Response | None) -> None:
        if isinstance(response, Plan):
            self._plan, self.stats.last_error, call.steered = response, "", True
            if self._plans is not None:
                self._plans.put(response)
        elif isinstance(response, codec.Welcome) and not call.welcomed:
            _check_version(response)
            # A step id that came damaged: it would ignore every outcome up to that one.
            heard = response.last_step_id
            self._astray = heard is not None and heard > self._last_step >= 0
            self.stats.reconnects += self._known
            self._known = call.welcomed = True
        elif isinstance(response, codec.Config) and response.draining and not call.draining:
            call.draining = True
            self._outbox.wake()

    def _write(self, call: Call) -> Iterator[bytes]:
        """Yield encoded requests as the engine reports; gRPC runs this in its writer thread."""
        run = self._run
        yield self._hello(call, run)
        while (report := self._next(call)) is not None:
            if report.run != run:
                run = report.run
                yield self._hello(call, run)
            try:
                data = codec.encode_request(codec.StepReport(report.outcome, report.view))
            except ValueError as error:
                log.warning("report dropped error=%r", str(error))
                self.stats.dropped_reports += 1
                continue
            if report.view is not None:
                call.ask()
            yield data
        if call.open:
            yield codec.encode_request(codec.Bye())

    def _hello(self, call: Call, run: int) -> bytes:
        call.ask()
        return codec.encode_request(codec.Hello(self._info.engine_id, self._info.limits, run))

    def _next(self, call: Call) -> Report | None:
        """Return the next report to send; None: it is time to leave."""
        while not call.leaving:
            report = self._outbox.get()
            if report is None:
                if self._closing.is_set():
                    return None
            elif call.leaving:
                self.stats.dropped_reports += 1
            elif self._plans is None and report.view is not None and len(self._outbox):
                # A newer view waits behind this one: only what this step teaches is worth sending.
                if report.outcome is not None:
                    return Report(report.run, report.outcome, None)
            else:
                return report
        return None

    def _hang_up(self, call: Call) -> None:
        """End a call and its writer, so that no report goes astray into the next one."""
        call.open = False
        self._outbox.wake()
        call.hang_up()

    def _watch(self) -> None:
        """End calls that have gone silent; runs in a thread of its own."""
        while not self._closing.wait(SILENCE_S / 4):
            if (call := self._call) is not None and call.silent():
                call.cancel()


def _check_version(welcome: codec.Welcome) -> None:
    """Raise ValueError where the sidecar goes on in a protocol that is not spoken here."""
    if welcome.protocol_version != codec.PROTOCOL_VERSION:
        raise ValueError(
            f"the sidecar speaks protocol version {welcome.protocol_version}, and we only"
            f" {codec.PROTOCOL_VERSION}: run an engine and a sidecar of the same release"
        )
