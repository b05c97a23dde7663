"""Who may call the sidecar, on real sockets: tokens, TLS, mTLS, scopes, rotation, no secrets."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
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
from grpc_health.v1 import health_pb2
from tests.certificates import authority, signed
from typer.testing import CliRunner

from parlay.controller import admin_cli, service
from parlay.controller import tokens as tokens_module
from parlay.controller.access import Door
from parlay.controller.audit import Audit
from parlay.controller.host import Host
from parlay.controller.service import serve
from parlay.controller.tls import ServerTls
from parlay.controller.tokens import Tokens
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.stats import serve_stats
from parlay.engine.stats_client import ask
from parlay.engine.stats_hub import StatsHub
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import PlanSource
from parlay.protos import codec
from parlay.protos.credentials import Credentials
from parlay.v1 import admin_pb2, policy_pb2, stats_pb2

WAIT_S = 30.0
ENGINE, ADMIN, STRANGER = "engine-0123456789abcdef", "admin-0123456789abcdef", "x" * 32


@pytest.fixture(scope="module")
def pki() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="parlay-") as name:
        folder = Path(name)
        ca = authority(folder)
        for who in ("server", "replica", "operator"):
            signed(folder, ca, who)
        authority(folder, "other")
        yield folder


def token_file(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(("# tokens", *lines)) + "\n")
    path.chmod(0o600)
    return path


@dataclass
class Served:
    target: str
    admin: str
    folder: Path

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit").read_text().splitlines()]


@contextlib.contextmanager
def serving(
    folder: Path,
    door: Door,
    admin_door: Door,
    listen: str = "",
    admin: str = "",
    **more: Any,
) -> Iterator[Served]:
    listen, admin = listen or f"unix:{folder}/s.sock", admin or f"unix:{folder}/admin.sock"
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    address: list[str] = []

    def told(where: str) -> None:
        address.append(where)
        ready.set()

    work = serve(
        Host("none"),
        listen,
        told,
        stop,
        grace_s=0.0,
        admin_target=admin,
        audit=Audit(folder / "audit"),
        door=door,
        admin_door=admin_door,
        **more,
    )
    thread = threading.Thread(target=loop.run_until_complete, args=(work,))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield Served(address[0], admin, folder)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        loop.close()


def ended(
    credentials: Credentials,
    target: str,
    method: str,
    said: tuple[tuple[str, str], ...],
    kind: str,
    data: bytes = b"",
) -> tuple[str, str]:
    """Call a method with a message, an empty one unless told; return its status and details."""
    with credentials.channel(target) as channel:
        call: Any = getattr(channel, kind)(method)
        message = iter([data]) if kind.startswith("stream") else data
        try:
            answer = call(message, timeout=WAIT_S, metadata=said)
            if kind.endswith("stream"):
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            failed: Any = error
            return failed.code().name, failed.details()
    return "OK", ""


def methods(module: Any, service: str) -> list[tuple[str, str]]:
    found = module.DESCRIPTOR.services_by_name[service]
    return [
        (
            f"/{found.full_name}/{method.name}",
            f"{'stream' if method.client_streaming else 'unary'}"
            f"_{'stream' if method.server_streaming else 'unary'}",
        )
        for method in found.methods
    ]


POLICY = methods(policy_pb2, "PolicyService") + methods(health_pb2, "Health")
PEOPLE = methods(admin_pb2, "AdminService")
WATCHERS = methods(stats_pb2, "StatsService") + methods(health_pb2, "Health")


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@contextlib.contextmanager
def engine(target: str, credentials: Credentials) -> Iterator[Callable[[], PlanSource]]:
    planner = RemotePlanner(
        target,
        EngineInfo("engine", LIMITS),
        LocalPlanner(make_policy("none")),
        credentials=credentials,
    )
    history = History(4)

    def step() -> PlanSource:
        plan, source = planner.plan(history.view())
        planner.observe(history.step(plan, source))
        time.sleep(0.005)
        return source

    step.planner = planner  # type: ignore[attr-defined]
    with contextlib.closing(planner):
        yield step


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


# --- Tokens --------------------------------------------------------------------------------------


def test_every_method_asks_for_a_token_of_its_own_scope(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engines = Tokens(token_file(folder, "engines", f"replicas {ENGINE}"))
    people = Tokens(token_file(folder, "people", f"alice {ADMIN}"))
    doors = Door(tokens=engines, others=people), Door(tokens=people, others=engines)
    assert len(POLICY) >= 5
    assert len(PEOPLE) == 9
    nobody = Credentials()
    with serving(folder, *doors) as served:
        for found, target, right, wrong in (
            (POLICY, served.target, ENGINE, ADMIN),
            (PEOPLE, served.admin, ADMIN, ENGINE),
        ):
            for method, kind in found:
                for said in ((), bearer(STRANGER), (("authorization", f"Basic {right}"),)):
                    assert ended(nobody, target, method, said, kind)[0] == "UNAUTHENTICATED"
                denied = ended(nobody, target, method, bearer(wrong), kind)
                assert denied == ("PERMISSION_DENIED", "this token is not for this listener")
                status, details = ended(nobody, target, method, bearer(right), kind)
                assert status not in ("UNAUTHENTICATED", "PERMISSION_DENIED"), (method, details)
        who = {entry["who"].get("token") for entry in served.audit()}
    assert who == {"alice"}
    assert not any(token in caplog.text for token in (ENGINE, ADMIN, STRANGER))
    assert "call refused method=/parlay.v1" in caplog.text


def test_every_service_is_asked_for_tokens_here() -> None:
    known = {method.split("/")[1] for method, _ in POLICY + PEOPLE + WATCHERS}
    folder = Path(policy_pb2.__file__).parent
    for name in {path.stem for path in folder.glob("*_pb2.py")}:
        file = importlib.import_module(f"parlay.v1.{name}").DESCRIPTOR
        assert {service.full_name for service in file.services_by_name.values()} <= known


def test_every_method_of_an_engines_stats_asks_for_a_token_of_its_own_scope(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people, engines = (token_file(folder, n, t) for n, t in (("p", ADMIN), ("e", ENGINE)))
    monkeypatch.setenv("PARLAY_SIDECAR_TOKEN_FILE", str(engines))
    address, nobody = f"unix:{folder}/stats.sock", Credentials()
    # No interval that WatchStats takes, and nothing to the others: no call waits for a step.
    data = stats_pb2.WatchStatsRequest(min_interval_ms=2**32 - 1).SerializeToString()
    with contextlib.closing(serve_stats(StatsHub("engine"), address, people)):
        for method, kind in WATCHERS:
            for said in ((), bearer(STRANGER), (("authorization", f"Basic {ADMIN}"),)):
                assert ended(nobody, address, method, said, kind, data)[0] == "UNAUTHENTICATED"
            denied = ended(nobody, address, method, bearer(ENGINE), kind, data)
            assert denied == ("PERMISSION_DENIED", "this token is not for stats")
            status, _ = ended(nobody, address, method, bearer(ADMIN), kind, data)
            assert status not in ("UNAUTHENTICATED", "PERMISSION_DENIED"), method
        with pytest.raises(ValueError, match="a token is needed"):
            ask(address, 1)
        monkeypatch.setenv("PARLAY_STATS_TOKEN_FILE", str(people))
        with pytest.raises(ValueError, match="neither running nor"):
            ask(address, 1)
        people.unlink()
        method, kind = WATCHERS[0]
        status, _ = ended(nobody, address, method, bearer(ADMIN), kind, data)
        assert status == "UNAUTHENTICATED"


def test_stats_are_not_served_to_other_hosts() -> None:
    for address in ("0.0.0.0:0", "10.0.0.1:7000"):
        with pytest.raises(ValueError, match="other hosts reach it"):
            serve_stats(StatsHub("engine"), address)


def test_an_engine_whose_token_is_taken_away_leaves_and_comes_back_with_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "CHECK_S", 0.05)
    mine = token_file(folder, "mine", ENGINE)
    tokens = Tokens(token_file(folder, "engines", f"old {ENGINE}"))
    with (
        serving(folder, Door(tokens=tokens), Door()) as served,
        engine(served.target, Credentials(token=mine)) as step,
    ):
        stats = step.planner.stats  # type: ignore[attr-defined]
        until(lambda: step() is PlanSource.REMOTE)
        token_file(folder, "engines", f"new {STRANGER}")
        until(lambda: step() is PlanSource.LOCAL and "UNAUTHENTICATED" in stats.last_error)
        assert step() is PlanSource.LOCAL
        token_file(folder, "mine", STRANGER)
        until(lambda: step() is PlanSource.REMOTE)
        assert stats.reconnects == 1


def test_an_engine_without_its_token_file_decides_locally_until_there_is_one(folder: Path) -> None:
    tokens = Tokens(token_file(folder, "engines", ENGINE))
    with (
        serving(folder, Door(tokens=tokens), Door()) as served,
        engine(served.target, Credentials(token=folder / "late")) as step,
    ):
        stats = step.planner.stats  # type: ignore[attr-defined]
        until(lambda: step() is PlanSource.LOCAL and "No such file" in stats.last_error)
        token_file(folder, "late", ENGINE)
        until(lambda: step() is PlanSource.REMOTE)


def test_a_token_never_travels_to_another_host_as_plain_text(folder: Path) -> None:
    token = Credentials(token=token_file(folder, "t", ENGINE))
    with pytest.raises(ValueError, match="needs TLS"):
        RemotePlanner(
            "10.0.0.1:1", EngineInfo("e"), LocalPlanner(make_policy("none")), credentials=token
        )
    with pytest.raises(ValueError, match="plain text"):
        Door(tokens=Tokens(folder / "t")).check("10.0.0.1:1", "the sidecar")


def test_people_show_the_token_that_the_environment_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = Tokens(token_file(folder, "people", f"alice {ADMIN}"))
    app = typer.Typer()
    app.command()(admin_cli.admin_list)
    with serving(folder, Door(), Door(tokens=people)) as served:
        done = CliRunner().invoke(app, ["--address", served.admin])
        assert (done.exit_code, "UNAUTHENTICATED: a token is needed" in done.output) == (1, True)
        monkeypatch.setenv("PARLAY_ADMIN_TOKEN_FILE", str(folder / "people"))
        assert CliRunner().invoke(app, ["--address", served.admin]).exit_code == 0
        monkeypatch.setenv("PARLAY_ADMIN_TOKEN_FILE", str(folder / "none"))
        done = CliRunner().invoke(app, ["--address", served.admin])
        assert (done.exit_code, len(done.output.splitlines())) == (1, 1)
        assert "No such file" in done.output


# --- TLS -----------------------------------------------------------------------------------------


def of(pki: Path, who: str, **more: Any) -> Credentials:
    return Credentials(pki / "ca.pem", pki / f"{who}.pem", pki / f"{who}.key", **more)


def test_an_engine_is_steered_over_tls_and_nobody_over_less(folder: Path, pki: Path) -> None:
    tokens = Tokens(token_file(folder, "engines", ENGINE))
    tls = ServerTls(pki / "server.pem", pki / "server.key")
    mine = token_file(folder, "mine", ENGINE)
    method, kind = POLICY[0]
    with serving(folder, Door(tls, tokens), Door(), listen="127.0.0.1:0") as served:
        with engine(served.target, Credentials(pki / "ca.pem", token=mine)) as step:
            until(lambda: step() is PlanSource.REMOTE)
        plain = ended(Credentials(), served.target, method, bearer(ENGINE), kind)
        assert plain[0] == "UNAVAILABLE"
        misled = ended(Credentials(pki / "other.pem"), served.target, method, (), kind)
        assert misled[0] == "UNAVAILABLE"
        named = Credentials(pki / "ca.pem", server_name="elsewhere.example")
        assert ended(named, served.target, method, (), kind)[0] == "UNAVAILABLE"
        known = Credentials(pki / "ca.pem", server_name="localhost")
        assert ended(known, served.target, method, (), kind)[0] == "UNAUTHENTICATED"


def test_certificates_open_doors_by_their_names_and_are_written_down(
    folder: Path, pki: Path
) -> None:
    tls = ServerTls(pki / "server.pem", pki / "server.key", pki / "ca.pem")
    door = Door(tls, names=frozenset(["replica"]))
    admin_door = Door(tls, names=frozenset(["operator"]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        admin = f"127.0.0.1:{free.getsockname()[1]}"
    with serving(folder, door, admin_door, "127.0.0.1:0", admin) as served:
        with engine(served.target, of(pki, "replica")) as step:
            until(lambda: step() is PlanSource.REMOTE)
        none = Credentials(pki / "ca.pem")
        for found, target, right, wrong in (
            (POLICY, served.target, "replica", "operator"),
            (PEOPLE, served.admin, "operator", "replica"),
        ):
            assert ended(none, target, found[0][0], (), found[0][1])[0] == "UNAVAILABLE"
            for method, kind in found:
                status, details = ended(of(pki, wrong), target, method, (), kind)
                assert status == "PERMISSION_DENIED"
                assert wrong in details
                status, details = ended(of(pki, right), target, method, (), kind)
                assert status not in ("UNAVAILABLE", "PERMISSION_DENIED"), (method, details)
        assert {entry["who"]["certificate"] for entry in served.audit()} == {"operator"}


def test_a_new_certificate_is_shown_to_new_connections(folder: Path, pki: Path) -> None:
    for name in ("server.pem", "server.key"):
        (folder / name).write_bytes((pki / name).read_bytes())
    tls = ServerTls(folder / "server.pem", folder / "server.key")
    tokens = Tokens(token_file(folder, "engines", ENGINE))
    with serving(folder, Door(tls, tokens), Door(), listen="127.0.0.1:0") as served:
        port = int(served.target.rpartition(":")[2])

        def shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", port), timeout=WAIT_S)

        before = shown()
        # In the midst of a rotation the two files do not belong together.
        (folder / "server.key").write_bytes((pki / "replica.key").read_bytes())
        assert shown() == before
        (folder / "server.pem").write_bytes((pki / "replica.pem").read_bytes())
        assert shown().strip() == (pki / "replica.pem").read_text().strip() != before.strip()


def test_files_that_do_not_fit_are_refused_in_one_line(folder: Path, pki: Path) -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        ServerTls(pki / "server.pem", pki / "replica.key")
    with pytest.raises(ValueError, match="no pair"):
        ServerTls(pki / "server.pem", pki / "server.pem")
    with pytest.raises(OSError, match="absent"):
        ServerTls(pki / "server.pem", pki / "absent")
    with pytest.raises(ValueError, match="holds no authority"):
        ServerTls(pki / "server.pem", pki / "server.key", pki / "replica.pem")
    with pytest.raises(ValueError, match="holds no certificates"):
        ServerTls(pki / "server.pem", pki / "server.key", pki / "server.key")


# --- Unix sockets, and the process ---------------------------------------------------------------


def test_a_unix_socket_has_the_mode_it_was_given(folder: Path) -> None:
    with serving(folder, Door(mode=0o660), Door()):
        assert stat.S_IMODE((folder / "s.sock").stat().st_mode) == 0o660
        assert stat.S_IMODE((folder / "admin.sock").stat().st_mode) == 0o600


@contextlib.contextmanager
def ended_after(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def test_a_hangup_reloads_what_may_change_and_says_no_secret(folder: Path) -> None:
    token_file(folder, "engines", f"old {ENGINE}")
    config = folder / "parlay.toml"
    text = (
        f'listen = "unix:{folder}/s.sock"\npolicy = "none"\ntokens = "{folder}/engines"\n'
        f'state = "memory"\nlog = "{folder}/log"\nlog_sample = 0.5\n'
    )
    config.write_text(text)
    command = [sys.executable, "-m", "parlay.controller", "--config", str(config)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process,
        ended_after(process),
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        assert "policy=none" in process.stdout.readline()
        lines = []

        def reload(new: str) -> list[str]:
            config.write_text(new)
            os.kill(process.pid, signal.SIGHUP)
            said: list[str] = []
            while not said or "reloaded" not in said[-1]:
                said.append(process.stderr.readline())  # type: ignore[union-attr]
                assert said[-1], "the sidecar has ended"
            lines.extend(said)
            return said

        said = reload(text.replace("0.5", "0.25") + 'log_level = "debug"\n')
        assert "changed=log_level,log_sample" in said[-1]
        said = reload(text.replace('"memory"', '"redis://:s3cret-password@nowhere:1"'))
        assert "key=state reason='needs a restart'" in said[0]
        assert (
            f"{config}: unknown key 'log_sampel', did you" in reload(text + "log_sampel = 1\n")[-1]
        )
        token_file(folder, "engines", f"new {STRANGER}")
        assert "tokens read anew" in reload(text)[0]
        method, kind = POLICY[0]
        for token, status in ((ENGINE, "UNAUTHENTICATED"), (STRANGER, "INVALID_ARGUMENT")):
            found = ended(Credentials(), f"unix:{folder}/s.sock", method, bearer(token), kind)
            assert found[0] == status
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(WAIT_S) == 0
    text = "".join(lines) + rest
    assert not any(secret in text for secret in (ENGINE, STRANGER, "s3cret"))
    assert "Traceback" not in text


# --- Limits --------------------------------------------------------------------------------------


def test_more_streams_than_the_most_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_CALLS", 3)
    leave = [threading.Event() for _ in range(4)]

    def asks(number: int) -> Iterator[bytes]:
        yield codec.encode_request(codec.Hello(f"engine-{number}", LIMITS, number))
        leave[number].wait(WAIT_S)

    with serving(folder, Door(), Door()) as served, grpc.insecure_channel(served.target) as channel:
        steer: Any = channel.stream_stream(codec.STEER)
        streams = [steer(asks(number), timeout=WAIT_S) for number in range(3)]
        assert all(next(stream) for stream in streams)
        with pytest.raises(grpc.RpcError) as refused:
            next(steer(asks(3), timeout=WAIT_S))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        leave[0].set()
        assert next(streams[0], None) is None

        def room() -> bool:
            try:
                return bool(next(steer(asks(3), timeout=WAIT_S)))
            except grpc.RpcError:
                return False

        until(room)
        for event in leave:
            event.set()
