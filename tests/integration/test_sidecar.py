"""The sidecar as a process, on real sockets: steered by, killed, frozen, restarted, lied to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.sidecars import Sidecar, running

from parlay.engine import remote
from parlay.engine.outbox import QUEUE_REPORTS
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.remote_call import Call
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import PlanSource
from parlay.protos import codec
from parlay.v1 import policy_pb2, policy_pb2_grpc

WAIT_S = 30.0
NONE = ("--policy", "none")


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with running("127.0.0.1:0", "--policy", "goodput") as found:
        yield found
        assert found.stop() == 0


@contextlib.contextmanager
def engine(target: str, **options: Any) -> Iterator[tuple[RemotePlanner, History]]:
    planner = RemotePlanner(
        target, EngineInfo("engine", LIMITS), LocalPlanner(make_policy("none")), **options
    )
    with contextlib.closing(planner):
        yield planner, History(8)


def step(planner: RemotePlanner, history: History) -> PlanSource:
    plan, source = planner.plan(history.view())
    planner.observe(history.step(plan, source))
    return source


def step_until(planner: RemotePlanner, history: History, source: PlanSource) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while step(planner, history) is not source:
        assert time.monotonic() < deadline_s, planner.stats
        time.sleep(0.005)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def run_to_failure(*arguments: str) -> str:
    """Run `parlay serve`, which must fail with one line; return that line."""
    command = [sys.executable, "-m", "parlay.controller", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1, done
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


# --- Steering ------------------------------------------------------------------------------------


def test_plans_come_from_the_sidecar_and_are_of_the_step_before(sidecar: Sidecar) -> None:
    with engine(sidecar.target) as (planner, history):
        step_until(planner, history, PlanSource.REMOTE)
        steered, deadline_s = 0, time.monotonic() + WAIT_S
        # A machine that stalls for eight steps is answered locally, which is no fault.
        while steered < 20:
            assert time.monotonic() < deadline_s, planner.stats
            view = history.view()
            plan, source = planner.plan(view)
            if source is PlanSource.REMOTE:
                assert plan is not None
                assert view.step_id - plan.expires_after_steps <= plan.step_id < view.step_id
                steered += 1
            planner.observe(history.step(plan, source))
            time.sleep(0.02)
        assert planner.stats.dropped_reports == 0
        assert len(planner.stats.engine_thread_us) == history.step_id


def test_a_new_run_of_step_ids_gets_plans_of_its_own(sidecar: Sidecar) -> None:
    with engine(sidecar.target, synchronous=True) as (planner, history):
        for _ in range(5):
            assert step(planner, history) is PlanSource.REMOTE
        again = History(3, seed=1)
        for _ in range(5):
            plan, source = planner.plan(again.view())
            assert source is PlanSource.REMOTE
            assert plan is not None
            np.testing.assert_array_equal(plan.request_id, again.view().request_id)
            planner.observe(again.step(plan, source))
        assert planner.stats.reconnects == 0


def test_a_client_of_the_typed_schema_is_served(sidecar: Sidecar) -> None:
    history = History(4)
    hello = policy_pb2.Hello(protocol_version=1, engine_id="simple", k_max=8, token_budget=512)
    wanted = codec.encode_decide(codec.Hello("simple"), history.view())
    view = policy_pb2.DecideRequest.FromString(wanted).view
    report = policy_pb2.ReportRequest.FromString(codec.encode_report("simple", history.step(None)))
    with grpc.insecure_channel(sidecar.target) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.Decide(policy_pb2.DecideRequest(hello=hello, view=view), timeout=WAIT_S)
        assert list(answer.plan.request_id) == list(view.request_id)
        assert len(answer.plan.k) == answer.plan.rows == 4
        assert stub.Report(report, timeout=WAIT_S).counted
        assert not stub.Report(report, timeout=WAIT_S).counted
        report.engine_id = "stranger"
        with pytest.raises(grpc.RpcError) as caught:
            stub.Report(report, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_says_serving(sidecar: Sidecar) -> None:
    with grpc.insecure_channel(sidecar.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "parlay.v1.PolicyService"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = stub.Check(request, timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


# --- Hostile clients -----------------------------------------------------------------------------


def steer(target: str, *messages: bytes) -> tuple[grpc.StatusCode, str]:
    """Send raw messages on one stream; return how it ended."""
    with grpc.insecure_channel(target) as channel:
        method: Any = channel.stream_stream(codec.STEER)
        call = method(iter(messages), timeout=WAIT_S)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code(), call.details()


HELLO = codec.encode_request(codec.Hello("liar", LIMITS))


@pytest.mark.parametrize(
    ("messages", "code", "text"),
    [
        ([b"\xff\xff\xff"], "INVALID_ARGUMENT", "no parlay.v1.SteerRequest"),
        ([b""], "INVALID_ARGUMENT", "must hold a hello"),
        ([HELLO, HELLO[:5]], "INVALID_ARGUMENT", "no parlay.v1.SteerRequest"),
        (
            [codec.encode_request(codec.StepReport(None, History(2).view()))],
            "INVALID_ARGUMENT",
            "the first message on a stream must be a hello",
        ),
        (
            [codec.encode_request(codec.Hello("e", protocol_version=9))],
            "FAILED_PRECONDITION",
            "protocol version 9 is not spoken here",
        ),
        ([codec.encode_request(codec.Hello(""))], "INVALID_ARGUMENT", "engine_id must have"),
    ],
)
def test_a_malformed_message_ends_its_stream_and_nothing_else(
    sidecar: Sidecar, messages: list[bytes], code: str, text: str
) -> None:
    with engine(sidecar.target, synchronous=True) as (planner, history):
        assert step(planner, history) is PlanSource.REMOTE
        status, details = steer(sidecar.target, *messages)
        assert status.name == code
        assert text in details
        assert "\n" not in details
        assert step(planner, history) is PlanSource.REMOTE
        assert planner.stats.reconnects == 0


def test_a_second_stream_of_the_same_engine_takes_over(sidecar: Sidecar) -> None:
    with engine(sidecar.target) as (old, history):
        step_until(old, history, PlanSource.REMOTE)
        hello = codec.encode_request(codec.Hello("engine", LIMITS, 5))
        assert steer(sidecar.target, hello)[0] is grpc.StatusCode.OK
        wait_for(lambda: step(old, history) is PlanSource.REMOTE and old.stats.reconnects == 1)


def test_engines_of_the_same_id_do_not_fight(sidecar: Sidecar) -> None:
    with engine(sidecar.target) as (old, history):
        step_until(old, history, PlanSource.REMOTE)
        with engine(sidecar.target) as (new, other):
            step_until(new, other, PlanSource.REMOTE)
            step_until(old, history, PlanSource.LOCAL)
            wait_for(lambda: "another stream said hello" in old.stats.last_error)
            for _ in range(80):
                step(old, history)
                step(new, other)
                time.sleep(0.01)
            assert new.stats.reconnects == 0


@pytest.mark.parametrize(
    "target",
    ["", "unix:", "nowhere", "host:0", "host:99999", ":50051", "h:\u0663", "dns:///", "a b:1"],
)
def test_what_can_be_no_address_is_refused_at_once(target: str) -> None:
    with pytest.raises(ValueError, match="unix:/path"):
        RemotePlanner(target, EngineInfo("engine"), LocalPlanner(make_policy("none")))


def test_an_engine_needs_a_name_of_some_length() -> None:
    for name in ("", "é" * 65):
        with pytest.raises(ValueError, match="engine_id must have 1 to 128 bytes"):
            EngineInfo(name)


# --- Faults --------------------------------------------------------------------------------------


def test_without_a_sidecar_the_fallback_decides(folder: Path) -> None:
    with engine(f"unix:{folder}/nobody.sock") as (planner, history):
        for _ in range(200):
            assert step(planner, history) is PlanSource.LOCAL
        assert not planner.connected
        assert planner.stats.plans_local == 200
        assert planner.stats.dropped_reports >= 200 - 64 - 1
        wait_for(lambda: "UNAVAILABLE" in planner.stats.last_error)


def test_a_long_outage_fills_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", (0.001, 0.001))
    with engine(f"unix:{folder}/nobody.sock") as (planner, history):
        for _ in range(100):
            planner._hang_up(Call(grpc.insecure_channel("unix:/nobody")))
            step(planner, history)
        assert len(planner._outbox) <= QUEUE_REPORTS + 20


def test_an_error_nobody_thought_of_ends_a_call_and_no_more(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, times = codec.decode_response, iter(range(2))

    def fails_at_first(data: bytes) -> codec.Response | None:
        if next(times, None) is None:
            return decode(data)
        raise MemoryError("nobody thought of this")

    monkeypatch.setattr(codec, "decode_response", fails_at_first)
    with engine(sidecar.target) as (planner, history):
        step_until(planner, history, PlanSource.REMOTE)
        assert next(times, None) is None


def test_a_killed_sidecar_is_replaced_at_the_same_address(folder: Path) -> None:
    with running(f"unix:{folder}/sidecar.sock", *NONE) as found:
        with engine(found.target) as (planner, history):
            step_until(planner, history, PlanSource.REMOTE)
            assert found.stop(signal.SIGKILL) == -signal.SIGKILL
            assert Path(folder, "sidecar.sock").exists()
            step_until(planner, history, PlanSource.LOCAL)
            found.start()
            step_until(planner, history, PlanSource.REMOTE)
            assert planner.stats.reconnects == 1
        assert found.stop() == 0
    assert not Path(folder, "sidecar.sock").exists()


def test_a_frozen_sidecar_is_left_alone_until_it_thaws(folder: Path) -> None:
    with running(f"unix:{folder}/sidecar.sock", *NONE) as found:
        with engine(found.target) as (planner, history):
            step_until(planner, history, PlanSource.REMOTE)
            found.freeze()
            step_until(planner, history, PlanSource.LOCAL)
            wait_for(lambda: step(planner, history) is PlanSource.LOCAL and not planner.connected)
            found.thaw()
            step_until(planner, history, PlanSource.REMOTE)
        assert found.stop() == 0


def test_a_sidecar_that_is_told_to_end_drains(folder: Path) -> None:
    with running(f"unix:{folder}/sidecar.sock", *NONE) as found:
        with engine(found.target) as (planner, history):
            step_until(planner, history, PlanSource.REMOTE)
            found.send(signal.SIGTERM)
            step_until(planner, history, PlanSource.LOCAL)
            found.process.wait(WAIT_S)
        assert found.stop() == 0
    assert found.errors == []


def test_closing_while_frozen_ends(folder: Path) -> None:
    with running(f"unix:{folder}/sidecar.sock", *NONE) as found:
        with engine(found.target) as (planner, history):
            step_until(planner, history, PlanSource.REMOTE)
            found.freeze()
            step(planner, history)
        assert found.stop() == 0


# --- Bad arguments -------------------------------------------------------------------------------


def test_an_address_in_use_is_refused(folder: Path, sidecar: Sidecar) -> None:
    assert "already in use" in run_to_failure("--listen", sidecar.target, "--policy", "none")
    path = folder / "taken.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        line = run_to_failure("--listen", f"unix:{path}", "--policy", "none")
    assert "another process does" in line
    assert path.exists()


def test_of_two_that_start_at_once_one_serves_and_one_says_why_not(folder: Path) -> None:
    command = [sys.executable, "-m", "parlay.controller", "--listen", f"unix:{folder}/s.sock"]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    try:
        deadline_s = time.monotonic() + WAIT_S
        while all(one.poll() is None for one in both):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        loser, winner = sorted(both, key=lambda one: one.poll() is None)
        said = loser.communicate(timeout=WAIT_S)
        assert said == (
            "",
            f"parlay serve: cannot listen on {folder}/s.sock: another process does\n",
        )
        assert loser.returncode == 1
        assert winner.stdout is not None
        assert "serving on" in winner.stdout.readline()
    finally:
        for one in both:
            one.terminate()
            one.communicate(timeout=WAIT_S)
    assert list(folder.iterdir()) == []


def test_arguments_that_cannot_be_are_refused_in_one_line(folder: Path) -> None:
    target = f"unix:{folder}/s.sock"
    file = folder / "file"
    file.write_text("mine")
    for arguments, text in [
        (("--listen", target, "--policy", "best"), "unknown policy 'best'"),
        (("--listen", target, "--set", "speed=11"), "no setting 'speed'"),
        (("--listen", target, "--set", "speed"), "key=value"),
        (("--listen", "nowhere"), "unix:/path or host:port"),
        (("--listen", target, "--admin", target), "another address than listen"),
        (("--listen", target, "--tokens", f"{folder}/no"), f"tokens: {folder}/no: No such file"),
        (("--listen", f"unix:{file}"), "is no socket"),
        (("--listen", f"unix:{folder}/none/s.sock"), "does not exist"),
        (("--listen", f"unix:{folder}/{'x' * 120}"), "at most 107 bytes"),
    ]:
        line = run_to_failure(*arguments)
        assert line.startswith("parlay serve: ")
        assert text in line
    assert file.read_text() == "mine"


def test_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "parlay.controller", "--listen", "127.0.0.1:0"]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            env=buffered,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_command_that_ends_takes_its_sidecar_along(number: signal.Signals) -> None:
    program = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
from parlay.engine.sidecar import sidecar_process
from parlay.policies import cli
def work(argv):
    with sidecar_process("none") as (target, pid):
        print(target, pid, flush=True)
        time.sleep(60)
cli.run = work
cli.main()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        target, pid = process.stdout.readline().split()
        socket = Path(target.removeprefix("unix:"))
        assert socket.exists()
        process.send_signal(number)
        killed = number == signal.SIGKILL
        assert process.wait(WAIT_S) == (-number if killed else 128 + number)
    until_s = time.monotonic() + (WAIT_S if killed else 0)
    while (alive(int(pid)) or socket.parent.exists()) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not alive(int(pid))
    assert not socket.parent.exists()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
