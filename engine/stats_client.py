"""Watching an engine from another process: its steps as they happen, or one request's figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from parlay.engine.address import check_address
from parlay.policies.types import BatchView, Plan, Proposer, StepOutcome
from parlay.protos import codec, columns
from parlay.protos import messages as m
from parlay.protos.credentials import from_environment
from parlay.v1 import stats_pb2 as pb
from parlay.wire.v1 import stats_pb2 as raw

SERVICE = "/parlay.v1.StatsService"
OPTIONS = (
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(slots=True, frozen=True)
class Seen:
    """A response to WatchStats: one step, the counts up to it, and how many steps were lost."""

    engine_id: str
    view: BatchView
    plan: Plan | None
    outcome: StepOutcome
    counters: dict[str, int]
    lost_steps: int


def watch(address: str, min_interval_ms: int = 0, timeout_s: float | None = None) -> Iterator[Seen]:
    """Yield what an engine's StatsService sends, for `timeout_s` at most (None: no limit).

    Raises ValueError, one line, where nobody serves there or the stream breaks; TimeoutError.
    """
    check_address(address, "stats")
    request = pb.WatchStatsRequest(min_interval_ms=min_interval_ms)
    ours = from_environment("PARLAY_STATS")
    with ours.channel(address, OPTIONS) as channel, _plainly(address):
        call: Any = channel.unary_stream(
            f"{SERVICE}/WatchStats",
            request_serializer=pb.WatchStatsRequest.SerializeToString,
        )(request, timeout=timeout_s, metadata=ours.metadata())
        try:
            for data in call:
                yield _seen(data)
        finally:
            call.cancel()


def ask(address: str, request_id: int, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return one request's figures as GetRequestStats names them; raises as `watch`.

    ValueError also where the engine does not know the request.
    """
    check_address(address, "stats")
    ours = from_environment("PARLAY_STATS")
    with ours.channel(address, OPTIONS) as channel, _plainly(address):
        method = channel.unary_unary(
            f"{SERVICE}/GetRequestStats",
            request_serializer=pb.GetRequestStatsRequest.SerializeToString,
            response_deserializer=pb.GetRequestStatsResponse.FromString,
        )
        asked = pb.GetRequestStatsRequest(request_id=request_id)
        answer = method(asked, timeout=timeout_s, metadata=ours.metadata())
    return _figures(answer)


def _seen(data: bytes) -> Seen:
    try:
        return _read(raw.WatchStatsResponse.FromString(data), columns.read_raw)
    except columns.Misfit:
        return _read(pb.WatchStatsResponse.FromString(data), columns.read_typed)


def _read(message: Any, read: columns.Read) -> Seen:
    return Seen(
        message.engine_id,
        m.read_view(message.report.view, read),
        m.read_plan(message.plan, read) if message.HasField("plan") else None,
        m.read_outcome(message.report.outcome, read),
        _figures(message.counters),
        message.lost_steps,
    )


def _figures(message: Any) -> dict[str, Any]:
    """Return a message as a dictionary; None where an optional field is absent."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            value = [_figures(each) for each in value]
        elif field.enum_type is not None:
            value = Proposer(value).name.lower()
        elif field.has_presence and not message.HasField(field.name):
            value = None
        found[field.name] = value
    return found


@contextlib.contextmanager
def _plainly(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError(f"stats at {address}: nothing came in time; is it idle?") from None
        if code is grpc.StatusCode.UNAVAILABLE:
            raise ValueError(f"nobody serves stats at {address}: {details}") from None
        raise ValueError(f"stats at {address}: {details or code.name}") from None
