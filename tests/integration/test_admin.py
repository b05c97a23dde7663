"""AdminService on real sockets: every call, every refusal, while an engine is steered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from tests.unit.controller.trials import DRAFTS, Watched, raises, registered
from typer.testing import CliRunner

from parlay.controller import admin_cli
from parlay.controller.access import Door
from parlay.controller.admin import SAYS
from parlay.controller.audit import Audit
from parlay.controller.host import Host
from parlay.controller.learned_states import read_snapshot
from parlay.controller.service import serve
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import Plan, PlanSource
from parlay.protos import codec
from parlay.v1 import admin_pb2 as pb
from parlay.v1 import admin_pb2_grpc

WAIT_S = 30.0


@dataclass
class Controller:
    """A controller in a thread of this process."""

    folder: Path
    host: Host
    call: Callable[..., Any]

    @property
    def target(self) -> str:
        return f"unix:{self.folder}/s.sock"

    @property
    def admin(self) -> str:
        return f"unix:{self.folder}/admin.sock"

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit").read_text().splitlines()]


@contextlib.contextmanager
def serving(policy: str = "none", snapshots: bool = True) -> Iterator[Controller]:
    with tempfile.TemporaryDirectory(prefix="parlay-") as name, contextlib.ExitStack() as stack:
        folder, host = Path(name), Host(policy)
        loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        work = serve(
            host,
            f"unix:{folder}/s.sock",
            lambda _: ready.set(),
            stop,
            grace_s=0.0,
            admin_target=f"unix:{folder}/admin.sock",
            audit=Audit(folder / "audit"),
            snapshots=folder if snapshots else None,
        )
        thread = threading.Thread(target=loop.run_until_complete, args=(work,))
        thread.start()
        stack.callback(loop.close)
        stack.callback(thread.join, WAIT_S)
        stack.callback(loop.call_soon_threadsafe, stop.set)
        assert ready.wait(WAIT_S)
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{folder}/admin.sock"))
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]

        def call(method: str, request: Any) -> Any:
            said = ((SAYS, "tester"),)
            return getattr(stub, method)(request, timeout=WAIT_S, metadata=said)

        yield Controller(folder, host, call)


@pytest.fixture
def controller() -> Iterator[Controller]:
    with serving() as found:
        yield found


@contextlib.contextmanager
def engine(controller: Controller) -> Iterator[Callable[[], Plan]]:
    """An engine that is steered; call it for a step."""
    info, fallback = EngineInfo("engine", LIMITS), LocalPlanner(make_policy("none"))
    history = History(8)
    planner = RemotePlanner(controller.target, info, fallback, synchronous=True)
    with contextlib.closing(planner):

        def step() -> Plan:
            plan, source = planner.plan(history.view())
            assert source is PlanSource.REMOTE, planner.stats
            assert plan is not None
            planner.observe(history.step(plan, source))
            return plan

        yield step


def refused(controller: Controller, method: str, request: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        controller.call(method, request)
    error: Any = caught.value
    assert "\n" not in error.details()
    return error.code().name, error.details()


def spec(name: str, **settings: str) -> pb.PolicySpec:
    return pb.PolicySpec(name=name, settings=settings)


FIXED = spec("fixed", proposer="draft_model", k="3")


def test_a_policy_goes_from_shadow_to_canary_to_active_and_back(controller: Controller) -> None:
    call = controller.call
    with engine(controller) as step:
        shadowed = call("ShadowPolicy", pb.ShadowPolicyRequest(spec=FIXED, enabled=True))
        assert shadowed.status.stage == pb.STAGE_SHADOW
        for _ in range(30):
            assert not step().k.any()
        seen = call("DescribePolicy", pb.DescribePolicyRequest(name="fixed"))
        assert seen.status.decisions >= 29
        assert seen.status.evidence.agreement < 0.2
        assert seen.status.evidence.no_value
        assert [setting.name for setting in seen.settings] == ["proposer", "k"]

        trial = pb.CanaryPolicyRequest(spec=FIXED, share=0.5, switch_back=True, reason="faster?")
        assert call("CanaryPolicy", trial).status.share == 0.5
        early = call("PromotePolicy", pb.PromotePolicyRequest(name="fixed"))
        assert not early.promoted
        assert (early.ratio_low, early.blocks) == (0.0, 0)
        assert "no pairs" in early.explanation
        done = early
        for _ in range(40):
            for _ in range(50):
                step()
            done = call("PromotePolicy", pb.PromotePolicyRequest(name="fixed", reason="it is"))
            if done.promoted:
                break
        assert done.promoted
        assert 1.0 < done.ratio_low < done.ratio < done.ratio_high
        step()
        assert (step().k == 3).any()

        back = call("RollBackPolicy", pb.RollBackPolicyRequest(reason="for a test"))
        assert (back.active.spec.name, back.taken_out.spec.name) == ("none", "fixed")
        assert not step().k.any()
        listed = call("ListPolicies", pb.ListPoliciesRequest()).policies
        assert [p.spec.name for p in listed if p.stage == pb.STAGE_ACTIVE] == ["none"]
        assert {"pilot", "learned", "fixed"} <= {p.spec.name for p in listed}

    trail = controller.audit()
    whats = [entry["what"] for entry in trail]
    assert whats[:3] == ["shadow", "canary", "promote"]
    assert trail[0]["who"]["says"] == "tester"
    assert trail[0]["who"]["peer"].startswith("unix:")
    assert trail[1]["why"] == "faster?"
    assert trail[2]["outcome"].startswith("refused: not promoted")
    assert trail[-2]["outcome"].startswith("promoted goodput")
    assert trail[-1]["why"] == "for a test"


def test_a_candidate_that_raises_is_rolled_back_and_written_down(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, _ = registered(monkeypatch, "wrong", lambda: Watched(raises))
    with engine(controller) as step:
        request = pb.CanaryPolicyRequest(spec=spec(wrong.name), share=1.0)
        controller.call("CanaryPolicy", request)
        for number in range(12):
            assert step().step_id == number
        status = controller.call("DescribePolicy", pb.DescribePolicyRequest(name="wrong")).status
    assert status.stage == pb.STAGE_UNSPECIFIED
    assert status.ended == "RuntimeError: a bug of two lines"
    last = controller.audit()[-1]
    assert (last["what"], last["who"]) == ("roll back", {"peer": "controller"})
    assert last["why"] == "RuntimeError: a bug of two lines"


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        ("DescribePolicy", pb.DescribePolicyRequest(name="x"), "INVALID_ARGUMENT", "unknown"),
        ("ActivatePolicy", pb.ActivatePolicyRequest(), "INVALID_ARGUMENT", "unknown policy ''"),
        (
            "ActivatePolicy",
            pb.ActivatePolicyRequest(spec=spec("fixed", k="many")),
            "INVALID_ARGUMENT",
            "should be of type int",
        ),
        (
            "ActivatePolicy",
            pb.ActivatePolicyRequest(spec=FIXED, engine_id="ghost"),
            "NOT_FOUND",
            "engine 'ghost' has not said hello",
        ),
        (
            "ActivatePolicy",
            pb.ActivatePolicyRequest(spec=spec("learned", path="/nowhere/net.npz")),
            "INVALID_ARGUMENT",
            "/nowhere/net.npz",
        ),
        (
            "ShadowPolicy",
            pb.ShadowPolicyRequest(spec=spec("none"), enabled=True),
            "FAILED_PRECONDITION",
            "is the active policy",
        ),
        (
            "ShadowPolicy",
            pb.ShadowPolicyRequest(spec=FIXED),
            "FAILED_PRECONDITION",
            "neither shadowed nor on canary",
        ),
        (
            "CanaryPolicy",
            pb.CanaryPolicyRequest(spec=FIXED, share=1.5),
            "INVALID_ARGUMENT",
            "between 0 and 1",
        ),
        (
            "PromotePolicy",
            pb.PromotePolicyRequest(name="fixed", force=True),
            "FAILED_PRECONDITION",
            "neither shadowed nor on canary",
        ),
        ("RollBackPolicy", pb.RollBackPolicyRequest(), "FAILED_PRECONDITION", "nothing to"),
        (
            "CreateSnapshot",
            pb.CreateSnapshotRequest(engine_id="ghost"),
            "NOT_FOUND",
            "'ghost' has not said hello",
        ),
        ("Drain", pb.DrainRequest(grace_ms=2**31), "INVALID_ARGUMENT", "at most"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    controller: Controller, method: str, request_: Any, code: str, text: str
) -> None:
    status, details = refused(controller, method, request_)
    assert (status, text in details) == (code, True), details
    if method != "DescribePolicy":
        assert controller.audit()[-1]["outcome"] == f"refused: {details}"


def test_a_snapshot_is_written_and_read(controller: Controller) -> None:
    controller.call("ActivatePolicy", pb.ActivatePolicyRequest(spec=spec("thompson")))
    with engine(controller) as step:
        for _ in range(10):
            step()
        made = controller.call("CreateSnapshot", pb.CreateSnapshotRequest())
    path = controller.folder / made.snapshot_id
    assert path.stat().st_size == made.size_bytes
    (saved,) = read_snapshot(path).engines
    assert (saved.engine_id, saved.spec.name) == ("engine", "thompson")


def test_without_a_folder_there_are_no_snapshots() -> None:
    with serving(snapshots=False) as controller:
        status, details = refused(controller, "CreateSnapshot", pb.CreateSnapshotRequest())
        assert status == "FAILED_PRECONDITION"
        assert "--snapshots" in details


def test_a_snapshot_that_cannot_be_written_is_refused_and_the_controller_goes_on(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, snapshot: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("parlay.controller.admin.write_snapshot", full)
    status, details = refused(controller, "CreateSnapshot", pb.CreateSnapshotRequest())
    assert status == "UNAVAILABLE"
    assert "No space left on device" in details
    controller.call("ListPolicies", pb.ListPoliciesRequest())


def test_draining_refuses_new_streams_and_cuts_the_open_ones(controller: Controller) -> None:
    hello = codec.encode_request(codec.Hello("idle", LIMITS))
    silent = threading.Event()

    def messages() -> Iterator[bytes]:
        yield hello
        silent.wait(WAIT_S)

    with grpc.insecure_channel(controller.target) as channel:
        method: Any = channel.stream_stream(codec.STEER)
        call = method(messages(), timeout=WAIT_S)
        next(call)
        begin_s = time.monotonic()
        answer = controller.call("Drain", pb.DrainRequest(grace_ms=200))
        assert answer.open_streams == 1
        again = method(iter([hello]), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError):
            next(again)
        assert again.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "time to leave is over" in call.details()
        assert 0.15 < time.monotonic() - begin_s < 5.0
        silent.set()
    deadline_s = time.monotonic() + WAIT_S
    while controller.host.sessions["idle"].stream:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert controller.call("Drain", pb.DrainRequest()).open_streams == 0


def test_the_admin_socket_is_its_owners_alone(controller: Controller) -> None:
    mode = (controller.folder / "admin.sock").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    with grpc.insecure_channel(controller.target) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListPolicies(pb.ListPoliciesRequest(), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("target", ["0.0.0.0:1", "10.1.2.3:50052", "[::]:1", "example.org:1"])
def test_admin_listens_where_no_other_host_can_reach_it(target: str) -> None:
    with pytest.raises(ValueError, match="it asks for no password"):
        Door().check(target, "admin")


def test_addresses_of_this_host_are_private() -> None:
    for target in ("unix:/a", "127.0.0.1:0", "localhost:5", "[::1]:5"):
        Door().check(target, "admin")


def test_a_trail_that_cannot_be_written_fails_no_call(controller: Controller) -> None:
    (controller.folder / "audit").mkdir()
    controller.call("ActivatePolicy", pb.ActivatePolicyRequest(spec=FIXED))
    assert controller.host.policy == "fixed"


# --- The command line ----------------------------------------------------------------------------


def run(command: Callable[..., None], *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_the_commands_do_what_they_say(controller: Controller) -> None:
    to = ("--address", controller.admin)
    settings = ("--set", "proposer=draft_model", "--set", "k=3")
    with engine(controller) as step:
        step()
        assert run(admin_cli.admin_shadow, "fixed", *settings, *to)[0] == 0
        for _ in range(5):
            step()
        status, text = run(admin_cli.admin_describe, "fixed", *to)
        assert (status, "agrees in" in text, "no estimate" in text) == (0, True, True)
        assert run(admin_cli.admin_shadow, "fixed", "--stop", *to)[0] == 0
        trial = ("fixed", "--share", "0.1", "--switch-back", *settings, *to)
        assert "share 0.1, switch-back" in run(admin_cli.admin_canary, *trial)[1]
        status, text = run(admin_cli.admin_promote, "fixed", *to)
        assert (status, "not promoted, no pairs" in text) == (1, True)
        status, text = run(admin_cli.admin_promote, "fixed", "--force", "--json", *to)
        told = json.loads(text)
        assert (status, told["promoted"], told["ratio"], told["ratio_low"]) == (0, True, None, 0.0)
        status, text = run(admin_cli.admin_list, "--json", *to)
        active = [p for p in json.loads(text)["policies"] if p["stage"] == "active"]
        assert active[0]["spec"] == {"name": "fixed", "settings": dict(DRAFTS.settings)}
        assert "none is active" in run(admin_cli.admin_rollback, "--reason", "no", *to)[1]
        assert "goodput is active" in run(admin_cli.admin_activate, "goodput", *to)[1]
        assert "bytes" in run(admin_cli.admin_snapshot, *to)[1]
        assert "streams open: 1" in run(admin_cli.admin_drain, "--grace-ms", "10", *to)[1]
    assert "@" in controller.audit()[0]["who"]["says"]


def test_what_fails_is_one_line_and_exit_status_1(controller: Controller) -> None:
    status, text = run(admin_cli.admin_rollback, "--address", controller.admin)
    assert (status, len(text.splitlines())) == (1, 1)
    assert text.startswith("parlay admin: FAILED_PRECONDITION: nothing to roll back")
    status, text = run(admin_cli.admin_list, "--address", f"unix:{controller.folder}/nobody")
    assert (status, len(text.splitlines())) == (1, 1)
    assert "nobody answers at unix:" in text
