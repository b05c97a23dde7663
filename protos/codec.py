"""BatchView, Plan and StepOutcome <-> messages of `parlay.v1`, for both sides of the wire.

Messages are written and read through the twin schema of raw bytes; what does not fit that is read
once more through the typed one. Whatever arrives is checked: ValueError with one line says what is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from parlay.policies.policy import EngineLimits
from parlay.policies.types import (
    K_LIMIT,
    PROPOSERS,
    BatchView,
    Plan,
    Proposer,
    StepOutcome,
)
from parlay.protos import columns as c
from parlay.protos import messages as m
from parlay.v1 import policy_pb2 as typed
from parlay.wire.v1 import policy_pb2 as raw

PROTOCOL_VERSION = 1
MAX_ID_BYTES = 128
MAX_MESSAGE_BYTES = 16 << 20
STEER = "/parlay.v1.PolicyService/Steer"


@dataclass(slots=True, frozen=True)
class Hello:
    """Who the engine is and what it can do; run_id changes exactly when its step ids start over."""

    engine_id: str
    limits: EngineLimits = field(default_factory=EngineLimits)
    run_id: int = 0
    protocol_version: int = PROTOCOL_VERSION


@dataclass(slots=True, frozen=True)
class StepReport:
    """What the step that ended did, and the batch of the one that starts; either may be absent."""

    outcome: StepOutcome | None
    view: BatchView | None


@dataclass(slots=True, frozen=True)
class Unread:
    """The outcome of a report, of which nothing was read yet but its step."""

    step_id: int
    data: bytes

    def read(self) -> StepOutcome:
        """Read the rest; raises ValueError where it is malformed or impossible."""
        return _decode(self.data, "SteerRequest", _read_outcome_of)


@dataclass(slots=True, frozen=True)
class HalfReport:
    """A StepReport whose view was read: a plan is made from that, and is waited for."""

    outcome: Unread
    view: BatchView


@dataclass(slots=True, frozen=True)
class Bye:
    """The engine leaves in good order."""

    reason: str = ""


@dataclass(slots=True, frozen=True)
class Welcome:
    """The controller's answer to a Hello; last_step_id None: it has had no outcome in this run."""

    policy: str
    resumed: bool
    last_step_id: int | None = None
    protocol_version: int = PROTOCOL_VERSION


@dataclass(slots=True, frozen=True)
class Config:
    """How the engine is to behave; draining: close the stream and come back later."""

    draining: bool = False


Request = Hello | StepReport | Bye
Response = Welcome | Plan | Config
Decoded = TypeVar("Decoded")


def encode_request(request: Request) -> bytes:
    """Return a SteerRequest."""
    if isinstance(request, StepReport):
        message = raw.SteerRequest()
        message.step_report.SetInParent()
        if request.outcome is not None:
            m.write_outcome(message.step_report.outcome, request.outcome)
        if request.view is not None:
            m.write_view(message.step_report.view, request.view)
    elif isinstance(request, Hello):
        message = raw.SteerRequest(hello=_hello_message(request))
    else:
        message = raw.SteerRequest(bye=typed.Bye(reason=request.reason))
    return bytes(message.SerializeToString())


def decode_request(data: bytes) -> Request:
    """Read a SteerRequest; raises ValueError where it is malformed or impossible."""
    return _decode(data, "SteerRequest", _read_request)


def open_request(data: bytes) -> Request | HalfReport:
    """Read a SteerRequest as `decode_request` does, of a report with both parts only the view."""
    return _decode(data, "SteerRequest", lambda message, read: _open_request(data, message, read))


def encode_response(response: Response) -> bytes:
    """Return a SteerResponse."""
    if isinstance(response, Plan):
        message = raw.SteerResponse()
        m.write_plan(message.plan_update.plan, response)
    elif isinstance(response, Welcome):
        welcome = typed.Welcome(
            protocol_version=response.protocol_version,
            policy=response.policy,
            resumed=response.resumed,
            last_step_id=response.last_step_id,
        )
        message = raw.SteerResponse(welcome=welcome)
    else:
        message = raw.SteerResponse(config=typed.Config(draining=response.draining))
    return bytes(message.SerializeToString())


def decode_response(data: bytes) -> Response | None:
    """Read a SteerResponse, None for a later protocol's; raises ValueError as decode_request."""
    return _decode(data, "SteerResponse", _read_response)


def encode_decide(hello: Hello, view: BatchView) -> bytes:
    """Return a DecideRequest."""
    message = raw.DecideRequest(hello=_hello_message(hello))
    m.write_view(message.view, view)
    return bytes(message.SerializeToString())


def decode_decide(data: bytes) -> tuple[Hello, BatchView]:
    """Read a DecideRequest; raises ValueError as decode_request."""
    return _decode(data, "DecideRequest", _read_decide)


def encode_decision(plan: Plan) -> bytes:
    """Return a DecideResponse."""
    message = raw.DecideResponse()
    m.write_plan(message.plan, plan)
    return bytes(message.SerializeToString())


def decode_decision(data: bytes) -> Plan:
    """Read a DecideResponse; raises ValueError as decode_request."""
    return _decode(data, "DecideResponse", _read_decision)


def encode_report(engine_id: str, outcome: StepOutcome) -> bytes:
    """Return a ReportRequest."""
    message = raw.ReportRequest(engine_id=engine_id)
    m.write_outcome(message.outcome, outcome)
    return bytes(message.SerializeToString())


def decode_report(data: bytes) -> tuple[str, StepOutcome]:
    """Read a ReportRequest; raises ValueError as decode_request."""
    return _decode(data, "ReportRequest", _read_report_request)


def encode_receipt(counted: bool) -> bytes:
    """Return a ReportResponse."""
    return bytes(raw.ReportResponse(counted=counted).SerializeToString())


def _hello_message(hello: Hello) -> typed.Hello:
    limits = hello.limits
    proposers: list[Any] = [int(p) for p in Proposer if p and limits.has(p)]
    return typed.Hello(
        protocol_version=hello.protocol_version,
        engine_id=hello.engine_id,
        run_id=hello.run_id,
        proposers=proposers,
        k_max=limits.k_max,
        bucket_edges=limits.bucket_edges,
        token_budget=limits.token_budget,
    )


def _decode(data: bytes, name: str, read_message: Callable[[Any, c.Read], Decoded]) -> Decoded:
    """Read through the twin schema, or the typed one where a column's length is not its count's."""
    try:
        try:
            return read_message(getattr(raw, name).FromString(data), c.read_raw)
        except c.Misfit:
            return read_message(getattr(typed, name).FromString(data), c.read_typed)
    except DecodeError:
        raise ValueError(f"the message is no parlay.v1.{name}") from None


def _open_request(data: bytes, message: Any, read: c.Read) -> Request | HalfReport:
    report = message.step_report
    if not (report.HasField("outcome") and report.HasField("view")):
        return _read_request(message, read)
    view, step_id = m.read_view(report.view, read), report.outcome.step_id
    _check_order(step_id, view)
    return HalfReport(Unread(step_id, data), view)


def _read_outcome_of(message: Any, read: c.Read) -> StepOutcome:
    return m.read_outcome(message.step_report.outcome, read)


def _check_order(outcome_step_id: int, view: BatchView) -> None:
    if outcome_step_id >= view.step_id:
        raise ValueError("the outcome's step must be before the view's")


def _read_request(message: Any, read: c.Read) -> Request:
    kind = message.WhichOneof("message")
    if kind == "step_report":
        report = message.step_report
        outcome = m.read_outcome(report.outcome, read) if report.HasField("outcome") else None
        view = m.read_view(report.view, read) if report.HasField("view") else None
        if outcome is not None and view is not None:
            _check_order(outcome.step_id, view)
        return StepReport(outcome, view)
    if kind == "hello":
        return _read_hello(message.hello)
    if kind == "bye":
        return Bye(message.bye.reason)
    raise ValueError("a SteerRequest must hold a hello, a step_report or a bye")


def _read_response(message: Any, read: c.Read) -> Response | None:
    kind = message.WhichOneof("message")
    if kind == "plan_update":
        return m.read_plan(message.plan_update.plan, read)
    if kind == "welcome":
        welcome = message.welcome
        last = welcome.last_step_id if welcome.HasField("last_step_id") else None
        return Welcome(welcome.policy, welcome.resumed, last, welcome.protocol_version)
    return Config(message.config.draining) if kind == "config" else None


def _read_decide(message: Any, read: c.Read) -> tuple[Hello, BatchView]:
    return _read_hello(message.hello), m.read_view(message.view, read)


def _read_decision(message: Any, read: c.Read) -> Plan:
    return m.read_plan(message.plan, read)


def _read_report_request(message: Any, read: c.Read) -> tuple[str, StepOutcome]:
    return message.engine_id, m.read_outcome(message.outcome, read)


def _read_hello(message: Any) -> Hello:
    """Read a Hello; a protocol version that is not spoken here is the caller's to refuse."""
    if message.protocol_version == PROTOCOL_VERSION:
        _check_hello(message)
    # Proposers of a later version are passed over: nobody here would choose them.
    mask = sum(1 << p for p in {0, *message.proposers} if 0 <= p < PROPOSERS)
    limits = EngineLimits(mask, message.k_max, tuple(message.bucket_edges), message.token_budget)
    return Hello(message.engine_id, limits, message.run_id, message.protocol_version)


def _check_hello(message: Any) -> None:
    if not 0 < len(message.engine_id.encode()) <= MAX_ID_BYTES:
        raise ValueError(f"engine_id must have 1 to {MAX_ID_BYTES} bytes")
    if message.k_max > K_LIMIT:
        raise ValueError(f"k_max must be at most {K_LIMIT}, not {message.k_max}")
    if message.token_budget == 0:
        raise ValueError("token_budget must be at least 1")
    edges = list(message.bucket_edges)
    if len(edges) > m.MAX_EDGES or edges != sorted(set(edges)) or 0 in edges:
        raise ValueError(f"bucket_edges must rise from 1 up, at most {m.MAX_EDGES} of them")
