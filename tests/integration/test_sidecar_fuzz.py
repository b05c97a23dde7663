"""Hostile messages through a real socket: each call ends with a reason, and nobody else notices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.fuzz import Fuzzer
from tests.sidecars import Sidecar, running

from parlay.controller.host import Host
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import PlanSource
from parlay.protos import codec
from parlay.v1 import policy_pb2 as typed

WAIT_S = 30.0
SERVICE = "/parlay.v1.PolicyService/"
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
}


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    with running("127.0.0.1:0", "--policy", "goodput") as found:
        yield found


def honest() -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return what an honest engine sends: on a stream, and as Decide and Report."""
    history, outcome = History(5), None
    # Another k_max: engines that are alike learn from each other, and trust each other.
    hello = codec.Hello("attacker", dataclasses.replace(LIMITS, k_max=5))
    asked, decides, reports = [codec.encode_request(hello)], [], []
    for _ in range(8):
        view = history.view()
        asked.append(codec.encode_request(codec.StepReport(outcome, view)))
        decides.append(codec.encode_decide(hello, view))
        outcome = history.step(None)
        reports.append(codec.encode_report("attacker", outcome))
    return asked, decides, reports


class Attacker:
    """Sends hostile messages and counts how calls end."""

    def __init__(self, channel: grpc.Channel, seed: int) -> None:
        asked, decides, reports = honest()
        self.codes: Counter[grpc.StatusCode] = Counter()
        self._steer: Any = channel.stream_stream(codec.STEER)
        self._calls = {
            "Decide": Fuzzer(seed + 1, decides, typed.DecideRequest),
            "Report": Fuzzer(seed + 2, reports, typed.ReportRequest),
        }
        self._asked, self._channel = Fuzzer(seed, asked, typed.SteerRequest), channel
        self._hello = asked[0]

    def stream(self, messages: int) -> None:
        """Open a stream, and send until it ends."""
        hostile = [self._asked.message() for _ in range(messages)]
        call = self._steer(iter([self._hello, *hostile]), timeout=WAIT_S)
        with contextlib.suppress(grpc.RpcError):
            for data in call:
                codec.decode_response(data)
        self._note(call)

    def unary(self) -> None:
        """Call Decide and Report."""
        for name, fuzzer in self._calls.items():
            method: Any = self._channel.unary_unary(SERVICE + name)
            call = method.future(fuzzer.message(), timeout=WAIT_S)
            call.exception()
            self._note(call)

    def _note(self, call: Any) -> None:
        self.codes[call.code()] += 1
        assert call.code() in EXPECTED, (call.code(), call.details())
        assert "\n" not in (call.details() or "")


@pytest.mark.parametrize("rounds", [60, pytest.param(1200, marks=pytest.mark.slow)])
def test_hostile_messages_reach_nobody_else(sidecar: Sidecar, rounds: int) -> None:
    alone, history, outcome = Host("goodput", late=True), History(6, seed=4), None
    session, _ = alone.hello(codec.Hello("honest", LIMITS), 1)
    fallback = LocalPlanner(make_policy("none"))
    planner = RemotePlanner(
        sidecar.target, EngineInfo("honest", LIMITS), fallback, synchronous=True
    )
    with contextlib.closing(planner), grpc.insecure_channel(sidecar.target) as channel:
        attacker = Attacker(channel, seed=rounds)
        for _ in range(rounds):
            attacker.stream(4)
            attacker.unary()
            view = history.view()
            plan, source = planner.plan(view)
            # Decides as it would were nobody else there.
            assert source is PlanSource.REMOTE
            assert plan is not None
            wanted = alone.report(session, 1, codec.StepReport(outcome, view))
            alone.settle(session)
            assert wanted is not None
            assert codec.encode_response(plan) == codec.encode_response(wanted)
            outcome = history.step(plan)
            planner.observe(outcome)
        assert planner.stats.reconnects == 0
    assert attacker.codes[grpc.StatusCode.INVALID_ARGUMENT] > rounds / 2
    assert sidecar.process.poll() is None
    assert not any("Traceback" in line or "failed" in line for line in sidecar.errors)


def test_a_message_that_is_too_large_is_refused_before_it_is_read(sidecar: Sidecar) -> None:
    held_mb = sidecar.resident_mb()
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(sidecar.target, options=options) as channel:
        for name in ("Decide", "Report"):
            method: Any = channel.unary_unary(SERVICE + name)
            with pytest.raises(grpc.RpcError) as caught:
                method(bytes(codec.MAX_MESSAGE_BYTES + 1), timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sidecar.resident_mb() < held_mb + 64.0


def test_a_column_of_a_million_rows_is_refused_at_little_cost(sidecar: Sidecar) -> None:
    view = typed.BatchView(rows=1_000_000, request_id=range(1_000_000))
    hello = typed.Hello(protocol_version=1, engine_id="attacker", token_budget=8)
    data = typed.DecideRequest(hello=hello, view=view).SerializeToString()
    with grpc.insecure_channel(sidecar.target) as channel:
        method: Any = channel.unary_unary(SERVICE + "Decide")
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                method(data, timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "rows must be at most 4096" in (caught.value.details() or "")
