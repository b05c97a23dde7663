"""Spans of the unary calls, as an exporter gets them, and a collector that is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.test_security import ended, engine, serving, until
from tests.sidecars import running

from parlay.controller.access import Door
from parlay.controller.tracing import FLUSH_S, Tracing
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import PlanSource
from parlay.protos import codec
from parlay.protos.credentials import Credentials
from parlay.v1 import admin_pb2

sdk: Any = pytest.importorskip("opentelemetry.sdk.trace")
export: Any = pytest.importorskip("opentelemetry.sdk.trace.export")
memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
WAIT_S = 30.0
POLICY, ADMIN = "parlay.v1.PolicyService", "parlay.v1.AdminService"
TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0x00F067AA0BA902B7


@pytest.fixture
def kept() -> Any:
    return memory.InMemorySpanExporter()


@pytest.fixture
def tracing(kept: Any) -> Tracing:
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    return Tracing(provider)


def call(target: str, method: str, message: bytes, **more: Any) -> None:
    with grpc.insecure_channel(target) as channel:
        ask: Callable[..., bytes] = channel.unary_unary(f"/{method}")
        ask(message, timeout=WAIT_S, wait_for_ready=True, **more)


def named(kept: Any, name: str) -> Any:
    """Return the one span of that name; a server ends it just after it has answered."""
    until(lambda: any(span.name == name for span in kept.get_finished_spans()))
    (found,) = (span for span in kept.get_finished_spans() if span.name == name)
    return found


def test_unary_calls_make_spans_below_that_of_the_caller(
    tmp_path: Path, tracing: Tracing, kept: Any
) -> None:
    history = History(4)
    with serving(tmp_path, Door(), Door(), tracing=tracing) as served:
        said = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01"),)
        ask = codec.encode_decide(codec.Hello("e", LIMITS), history.view())
        call(served.target, f"{POLICY}/Decide", ask, metadata=said)
        outcome = codec.encode_report("e", history.step(None, PlanSource.REMOTE))
        call(served.target, f"{POLICY}/Report", outcome)
        listing = admin_pb2.ListPoliciesRequest().SerializeToString()
        call(served.admin, f"{ADMIN}/ListPolicies", listing)
        decide, report, listed = (
            named(kept, name)
            for name in (f"{POLICY}/Decide", f"{POLICY}/Report", f"{ADMIN}/ListPolicies")
        )
    assert (decide.context.trace_id, decide.parent.span_id) == (TRACE, PARENT)
    assert report.parent is None
    assert report.context.trace_id != TRACE
    for span in (decide, report, listed):
        service, _, method = span.name.partition("/")
        assert span.kind.name == "SERVER"
        assert span.status.status_code.name == "UNSET"
        assert dict(span.attributes) == {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "rpc.grpc.status_code": 0,
        }
        assert 0 < span.end_time - span.start_time < WAIT_S * 1e9


def test_a_call_that_fails_says_so_and_is_an_error_where_we_are_to_blame(
    tmp_path: Path, tracing: Tracing, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, Door(), Door(), tracing=tracing) as served:
        found = ended(Credentials(), served.target, f"/{POLICY}/Report", (), "unary_unary")
        assert found[0] == "INVALID_ARGUMENT"
        wrong = named(kept, f"{POLICY}/Report")
        assert wrong.attributes["rpc.grpc.status_code"] == 3
        assert wrong.status.status_code.name == "UNSET"

        def fails(*_: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr("parlay.controller.host.Host.decide", fails)
        ask = codec.encode_decide(codec.Hello("e", LIMITS), History(4).view())
        with pytest.raises(grpc.RpcError):
            call(served.target, f"{POLICY}/Decide", ask)
        ours = named(kept, f"{POLICY}/Decide")
        assert ours.attributes["rpc.grpc.status_code"] == 13
        assert ours.status.status_code.name == "ERROR"
        assert ours.status.description == "INTERNAL"


def test_streams_and_probes_make_none(tmp_path: Path, tracing: Tracing, kept: Any) -> None:
    with serving(tmp_path, Door(), Door(), tracing=tracing) as served:
        with engine(served.target, Credentials()) as step:
            until(lambda: step() is PlanSource.REMOTE)
        call(served.target, "grpc.health.v1.Health/Check", b"")
    assert kept.get_finished_spans() == ()


def test_a_collector_that_is_away_keeps_no_process(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with running(f"unix:{tmp_path}/s.sock", "--otel", environ=environ) as sidecar:
        ask = codec.encode_decide(codec.Hello("e", LIMITS), History(4).view())
        call(sidecar.target, f"{POLICY}/Decide", ask)
        began_s = time.monotonic()
        assert sidecar.stop() == 0
        assert time.monotonic() - began_s < FLUSH_S + 5.0
