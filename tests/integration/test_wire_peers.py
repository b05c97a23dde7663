"""Peers that are not the project's own client: plain generated Python, older and newer releases."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.sidecars import Sidecar, running
from tests.wire_corpus import wrapped

from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.protos import codec
from parlay.v1 import policy_pb2 as typed

WAIT_S = 30.0
EXAMPLE = Path(__file__).parents[2] / "protos" / "example_client.py"


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with running("127.0.0.1:0", "--policy", "ngram_gate") as found:
        yield found


# --- The example ---------------------------------------------------------------------------------


def test_the_example_is_short_and_needs_only_what_is_generated() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert modules <= {"sys", "time", "grpc", "parlay.v1"}


def test_the_example_is_served_as_often_as_it_is_run(sidecar: Sidecar) -> None:
    for _ in range(2):
        command = [sys.executable, str(EXAMPLE), sidecar.target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
        plan, receipt = done.stdout.splitlines()
        assert plan.startswith("proposers [")
        assert "1" in plan
        assert receipt == "counted"


@pytest.mark.parametrize("arguments", [(), ("unix:/nowhere.sock",)])
def test_the_example_says_in_one_line_what_is_missing(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, str(EXAMPLE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert ("no plan from unix:/nowhere.sock" if arguments else "usage: ") in done.stderr


# --- Peers of other releases ---------------------------------------------------------------------


def ended(target: str, *messages: bytes) -> tuple[list[Any], grpc.StatusCode, str]:
    """Send messages on one stream; return the answers, and how it ended."""
    answers = []
    with grpc.insecure_channel(target) as channel:
        method: Any = channel.stream_stream(codec.STEER)
        call = method(iter(messages), timeout=WAIT_S)
        with contextlib.suppress(grpc.RpcError):
            answers += [codec.decode_response(data) for data in call]
        return answers, call.code(), call.details()


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_an_engine_of_another_protocol_is_told_what_is_spoken_here(
    sidecar: Sidecar, version: int
) -> None:
    # All else in it may mean anything: only the version is read.
    hello = typed.Hello(protocol_version=version, k_max=2**31, bucket_edges=[0, 0])
    data = typed.SteerRequest(hello=hello).SerializeToString()
    answers, code, details = ended(sidecar.target, data)
    assert (answers, code) == ([], grpc.StatusCode.FAILED_PRECONDITION)
    assert details == (
        f"protocol version {version} is not spoken here, only 1: run an engine and a controller"
        " of the same release"
    )


def test_a_newer_engine_of_the_same_protocol_is_served(sidecar: Sidecar) -> None:
    view = History(2).view()
    later = wrapped(100, b"later") + wrapped(200, b"much later")
    asked = typed.SteerRequest(hello=typed.Hello(protocol_version=1, engine_id="n", token_budget=9))
    hello = asked.hello.SerializeToString() + later
    report = codec.encode_request(codec.StepReport(None, view))
    message = typed.SteerRequest.FromString(report).step_report
    body = message.view.SerializeToString() + wrapped(500, b"a column of later") + later
    told = wrapped(2, wrapped(2, body) + later) + later
    bye = codec.encode_request(codec.Bye())
    answers, code, details = ended(sidecar.target, wrapped(1, hello) + later, told, bye)
    assert code is grpc.StatusCode.OK, details
    welcome, plan = answers
    assert isinstance(welcome, codec.Welcome)
    assert plan.request_id.tolist() == view.request_id.tolist()


@contextlib.contextmanager
def other_sidecar(folder: Path, answer: Callable[[codec.Request], list[bytes]]) -> Iterator[str]:
    """Serve a sidecar of another release, which answers as told."""

    def steer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for data in requests:
            yield from answer(codec.decode_request(data))

    handler: Any = grpc.stream_stream_rpc_method_handler(steer)
    methods: dict[str, Any] = {"Steer": handler}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("parlay.v1.PolicyService", methods),)
    )
    target = f"unix:{folder}/other.sock"
    server.add_insecure_port(target)
    server.start()
    try:
        yield target
    finally:
        stopped: threading.Event = server.stop(0.0)
        assert stopped.wait(WAIT_S)


def run(target: str, holds: Callable[[RemotePlanner], bool]) -> RemotePlanner:
    """Run an engine at a sidecar until it holds."""
    planner = RemotePlanner(target, EngineInfo("engine", LIMITS), LocalPlanner(make_policy("none")))
    history, deadline_s = History(3), time.monotonic() + WAIT_S
    with contextlib.closing(planner):
        while not holds(planner):
            assert time.monotonic() < deadline_s, planner.stats
            plan, source = planner.plan(history.view())
            planner.observe(history.step(plan, source))
            time.sleep(0.005)
    return planner


def test_a_sidecar_of_another_protocol_is_left_alone_and_said(folder: Path) -> None:
    def answer(request: codec.Request) -> list[bytes]:
        welcome = codec.Welcome("later", False, protocol_version=2)
        return [codec.encode_response(welcome)] if isinstance(request, codec.Hello) else []

    with other_sidecar(folder, answer) as target:
        stats = run(target, lambda planner: bool(planner.stats.endings)).stats
    assert stats.last_error == (
        "answer refused: the sidecar speaks protocol version 2, and we only 1: run an engine and a"
        " sidecar of the same release"
    )
    assert stats.plans_remote == 0
    assert stats.endings["refused"] > 0


def test_a_newer_sidecar_of_the_same_protocol_is_followed(folder: Path) -> None:
    policy, later = make_policy("none", None, LIMITS), wrapped(100, b"later")

    def answer(request: codec.Request) -> list[bytes]:
        if isinstance(request, codec.Hello):
            welcome = codec.encode_response(codec.Welcome("later", False))
            # A kind of answer that is not known here, too.
            return [welcome + later, wrapped(12, b"news")]
        if isinstance(request, codec.StepReport) and request.view is not None:
            return [codec.encode_response(policy.decide(request.view)) + later]
        return []

    with other_sidecar(folder, answer) as target:
        stats = run(target, lambda planner: planner.stats.plans_remote > 5).stats
    assert stats.endings.total() == 0


def test_a_sidecar_that_has_heard_of_steps_to_come_is_told_of_another_run(folder: Path) -> None:
    runs: list[int] = []

    def answer(request: codec.Request) -> list[bytes]:
        if not isinstance(request, codec.Hello):
            return []
        runs.append(request.run_id)
        # As after an outcome whose step id came damaged.
        heard = 2**50 if request.run_id == runs[0] else None
        return [codec.encode_response(codec.Welcome("none", True, heard))]

    with other_sidecar(folder, answer) as target:
        # On a busy machine the first stream may end, and the same run come again, before it hears.
        run(target, lambda planner: runs[-1:] != runs[:1])
    assert runs[-1] == runs[0] + 1
