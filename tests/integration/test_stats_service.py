"""StatsService over real sockets: watchers fast, slow and gone, requests known and unknown."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from parlay.engine import stats_cli, stats_hub
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.stats import MAX_INTERVAL_MS, StatsServer, serve_stats
from parlay.engine.stats_client import ask, watch
from parlay.engine.stats_hub import StatsHub
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, StepCost, Task, VirtualBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import Proposer, task_id
from parlay.v1 import stats_pb2 as pb
from parlay.v1 import stats_pb2_grpc
from parlay.wire.v1 import stats_pb2 as raw

WAIT_S = 20.0
Stub: Any = stats_pb2_grpc.StatsServiceStub
Health: Any = health_pb2_grpc.HealthStub
NEVER = Task({Proposer.NGRAM: (0.0,)})
SOME = Task({Proposer.NGRAM: (0.7,)})


class Served:
    """An engine on the virtual backend with a StatsService beside it."""

    def __init__(self, address: str, task: Task = SOME, policy: str = "fixed") -> None:
        backend = VirtualBackend(Hazards({"t": task}), StepCost())
        settings = {"proposer": "ngram", "k": 3} if policy == "fixed" else {}
        planner = LocalPlanner(make_policy(policy, settings, backend.limits()))
        self.engine = Engine(backend, planner, EngineConfig(max_running=64))
        self.hub = StatsHub("replica-1")
        self.hub.attach(self.engine)
        self.server: StatsServer = serve_stats(self.hub, address)
        self.address = self.server.address

    def ask(self, tokens: int = 40) -> Request:
        params = SamplingParams(max_tokens=tokens)
        return self.engine.add([1, 2, 3], params, SpeculationParams(task="t"))

    def steps(self, count: int, pace_s: float = 0.0) -> None:
        for _ in range(count):
            if self.engine.step() is None:
                break
            time.sleep(pace_s)

    def watched_by(self, count: int) -> None:
        until(lambda: self.hub.subscribers == count)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    running = Served(f"unix:{folder / 'stats.sock'}")
    with contextlib.closing(running.server):
        yield running


def until(there: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not there():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


class Watcher(threading.Thread):
    """Reads a stream to its end, in a thread of its own; keeps the messages as they came."""

    def __init__(self, address: str, interval_ms: int = 0) -> None:
        super().__init__(daemon=True)
        self.address, self.interval_ms, self.code = address, interval_ms, ""
        self.came: list[bytes] = []
        self.came_s: list[float] = []
        self.reads = threading.Event()
        self.reads.set()
        self.start()

    def run(self) -> None:
        # A window that does not grow: what is sent ahead of a watcher that does not read is little.
        options = (("grpc.http2.bdp_probe", 0),)
        with grpc.insecure_channel(self.address, options) as channel:
            request = pb.WatchStatsRequest(min_interval_ms=self.interval_ms)
            method: Any = channel.unary_stream("/parlay.v1.StatsService/WatchStats")
            call = method(request.SerializeToString())
            with contextlib.suppress(grpc.RpcError):
                for message in call:
                    self.came_s.append(time.monotonic())
                    self.came.append(message)
                    self.reads.wait(WAIT_S)
            self.code = call.code().name

    @property
    def seen(self) -> list[pb.WatchStatsResponse]:
        return [pb.WatchStatsResponse.FromString(data) for data in self.came]

    @property
    def ids(self) -> list[int]:
        return [seen.report.outcome.step_id for seen in self.seen]


def end(served: Served, *watchers: Watcher) -> None:
    """Close the server in good order and wait for what it sent to be read."""
    time.sleep(0.1)
    served.server.close()
    for watcher in watchers:
        watcher.join(WAIT_S)
        assert not watcher.is_alive()


@pytest.mark.slow
def test_a_thousand_steps_reach_every_watcher_or_are_counted(served: Served) -> None:
    watchers = [Watcher(served.address) for _ in range(4)]
    served.watched_by(4)
    for _ in range(8):
        served.ask(tokens=4000)
    served.steps(1000)
    until(lambda: served.hub.counters.steps == 1000)
    end(served, *watchers)
    for watcher in watchers:
        seen, ids = watcher.seen, watcher.ids
        assert watcher.code == "OK"
        assert ids == sorted(set(ids))
        assert ids[-1] == 999, "the newest is never the one that is lost"
        assert len(ids) + seen[-1].lost_steps == 1000
        assert all(s.counters.steps == s.report.outcome.step_id + 1 for s in seen)


def test_a_step_arrives_as_it_was(served: Served) -> None:
    for _ in range(8):
        served.ask()
    stream = watch(served.address, timeout_s=WAIT_S)
    threading.Timer(0.05, served.steps, (5, 0.01)).start()
    for step_id in range(5):
        seen = next(stream)
        assert seen.engine_id == "replica-1"
        assert seen.view.step_id == seen.outcome.step_id == step_id
        assert np.array_equal(seen.outcome.request_id, seen.view.request_id)
        assert seen.plan is not None
        assert np.array_equal(seen.plan.request_id, seen.view.request_id)
    assert seen.outcome.emitted.sum() > 8, "drafts are accepted"
    assert seen.counters["emitted_tokens"] == served.hub.counters.emitted_tokens
    stream.close()  # type: ignore[attr-defined]


def test_paced_steps_are_all_seen(served: Served) -> None:
    watcher = Watcher(served.address)
    served.watched_by(1)
    served.ask(tokens=1000)
    served.steps(60, 0.002)
    until(lambda: len(watcher.came) == 60)
    assert watcher.ids == list(range(60))
    assert watcher.seen[-1].lost_steps == 0
    end(served, watcher)


def test_a_slow_watcher_loses_the_oldest_and_is_told_how_many(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_hub, "QUEUE_STEPS", 8)
    slow, fast = Watcher(served.address), Watcher(served.address)
    served.watched_by(2)
    slow.reads.clear()
    for _ in range(32):
        served.ask(tokens=4000)
    served.steps(200, 0.001)
    until(lambda: served.hub.counters.steps == 200)
    slow.reads.set()
    end(served, slow, fast)
    lost = slow.seen[-1].lost_steps
    assert lost > 0
    assert len(slow.came) + lost == 200
    assert slow.ids[-8:] == list(range(192, 200)), "what is lost is never the newest"
    assert len(fast.came) + fast.seen[-1].lost_steps == 200
    assert len(fast.came) > len(slow.came)


def test_a_watcher_that_leaves_makes_room(served: Served) -> None:
    stream = watch(served.address, timeout_s=WAIT_S)
    served.ask(tokens=100)
    served.steps(3)
    next(stream)
    assert served.hub.subscribers == 1
    stream.close()  # type: ignore[attr-defined]
    served.watched_by(0)


@pytest.mark.slow
def test_a_watcher_that_leaves_while_it_is_written_to_makes_room(served: Served) -> None:
    for _ in range(64):
        served.ask(tokens=4000)
    with grpc.insecure_channel(served.address) as channel:
        call = Stub(channel).WatchStats(pb.WatchStatsRequest())
        served.watched_by(1)
        served.steps(200)
        until(lambda: served.hub.counters.steps == 200)
        assert call.is_active()
    served.watched_by(0)


def test_more_watchers_than_places_are_told_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_hub, "MAX_SUBSCRIBERS", 2)
    watchers = [Watcher(served.address) for _ in range(2)]
    served.watched_by(2)
    with pytest.raises(ValueError, match="2 callers watch, which is the most at a time"):
        next(watch(served.address, timeout_s=WAIT_S))
    end(served, *watchers)


def test_who_samples_gets_steps_that_far_apart(served: Served) -> None:
    watcher = Watcher(served.address, interval_ms=100)
    served.watched_by(1)
    served.ask(tokens=4000)
    served.steps(250, 0.002)
    end(served, watcher)
    assert 2 <= len(watcher.came) < 30
    assert min(np.diff(watcher.came_s)) > 0.08
    assert watcher.seen[-1].lost_steps == 0


@pytest.mark.parametrize("interval_ms", [MAX_INTERVAL_MS + 1, 2**32 - 1])
def test_an_interval_that_would_keep_a_place_for_days_is_refused(
    served: Served, interval_ms: int
) -> None:
    with pytest.raises(ValueError, match=r"min_interval_ms must be at most 3600000"):
        next(watch(served.address, interval_ms, WAIT_S))
    assert served.hub.subscribers == 0


def test_a_watcher_with_the_longest_interval_does_not_delay_the_end(served: Served) -> None:
    served.ask()
    served.steps(2)
    watcher = Watcher(served.address, interval_ms=MAX_INTERVAL_MS)
    until(lambda: len(watcher.came) == 1)
    start_s = time.monotonic()
    end(served, watcher)
    assert time.monotonic() - start_s < 8.0  # close gives up after 10


@pytest.mark.slow
def test_a_watcher_that_does_not_read_does_not_delay_the_end(served: Served) -> None:
    stalled = Watcher(served.address)
    served.watched_by(1)
    stalled.reads.clear()
    for _ in range(32):
        served.ask(tokens=4000)
    served.steps(200, 0.001)
    until(lambda: served.hub.counters.steps == 200)
    start_s = time.monotonic()
    served.server.close()
    assert time.monotonic() - start_s < 8.0  # close gives up after 10
    stalled.reads.set()
    stalled.join(WAIT_S)
    assert stalled.code in ("CANCELLED", "UNAVAILABLE")


def test_messages_that_are_none_are_refused(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        one: Any = channel.unary_unary("/parlay.v1.StatsService/GetRequestStats")
        many: Any = channel.unary_stream("/parlay.v1.StatsService/WatchStats")
        for call in (one, lambda data: next(many(data))):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"\xff\xff")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.RpcError) as large:
                call(bytes(1 << 20))
            assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_request_is_known_while_it_waits_runs_and_has_finished(served: Served) -> None:
    request = served.ask(tokens=30)
    waits = ask(served.address, request.request_id)
    assert (waits["output_tokens"], waits["ttft_ms"], waits["finished"]) == (0, None, False)
    served.steps(3)
    runs = ask(served.address, request.request_id)
    assert runs["output_tokens"] == request.output_tokens > 0
    assert (runs["task"], runs["prompt_tokens"]) == (task_id("t"), 3)
    assert runs["ttft_ms"] > 0
    assert not runs["finished"]
    served.steps(100)
    over = ask(served.address, request.request_id)
    assert (over["output_tokens"], over["steps"], over["finished"]) == (30, request.steps, True)
    by = {row["proposer"]: row for row in over["proposers"]}
    assert set(by) == {"ngram"}
    assert by["ngram"]["accepted_tokens"] == request.accepted > 0
    assert by["ngram"]["drafted_tokens"] == request.drafted


def test_a_request_that_is_unknown_is_not_found(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        stub = Stub(channel)
        with pytest.raises(grpc.RpcError) as missing:
            stub.GetRequestStats(pb.GetRequestStatsRequest(request_id=2**64 - 1))
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND
    assert str(2**64 - 1) in (missing.value.details() or "")


def test_health_is_served(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        for name in ("", "parlay.v1.StatsService"):
            answer = Health(channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_port_of_its_own_choice_is_told_and_one_in_use_refused() -> None:
    running = Served("127.0.0.1:0")
    with contextlib.closing(running.server):
        running.ask()
        running.steps(2)
        assert next(watch(running.address, timeout_s=WAIT_S)).outcome.step_id == 1
        with pytest.raises(OSError, match=f"cannot be served at {running.address}: .*in use"):
            serve_stats(StatsHub("other"), running.address)


def test_a_socket_in_use_is_refused_and_one_left_behind_replaced(folder: Path) -> None:
    path = folder / "stats.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    running = Served(f"unix:{path}")
    with (
        contextlib.closing(running.server),
        pytest.raises(OSError, match="somebody serves there already"),
    ):
        serve_stats(StatsHub("other"), f"unix:{path}")
    assert not path.exists()
    running.server.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nowhere", "write it as unix:/path or host:port"),
        ("unix:", "the path is missing"),
        ("unix:/no/such/folder/s.sock", "no folder /no/such/folder"),
        ("127.0.0.1:99999", "write it as"),
        ("no.such.host.invalid:0", "cannot be served at"),
    ],
)
def test_an_address_that_cannot_be_is_refused_in_one_line(address: str, said: str) -> None:
    with pytest.raises((ValueError, OSError), match=said) as refused:
        serve_stats(StatsHub("engine"), address)
    assert "\n" not in str(refused.value)


def test_the_twin_has_the_same_fields() -> None:
    ours = raw.DESCRIPTOR.message_types_by_name["WatchStatsResponse"].fields_by_name
    typed = pb.DESCRIPTOR.message_types_by_name["WatchStatsResponse"].fields_by_name
    assert {n: f.number for n, f in ours.items()} == {n: f.number for n, f in typed.items()}


def run_cli(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(stats_cli.stats)
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


def test_the_command_shows_one_step_where_nobody_looks(served: Served) -> None:
    served.ask()
    served.ask()
    served.steps(5)
    code, text = run_cli(served.address)
    assert code == 0
    assert "replica-1" in text
    assert "step 4" in text
    assert "ngram" in text
    code, text = run_cli(served.address, "--json")
    step = json.loads(text)
    assert (code, step["step_id"], len(step["requests"])) == (0, 4, 2)
    assert step["counters"]["steps"] == 5


def test_the_command_follows_the_steps_as_json_lines(served: Served) -> None:
    served.ask(tokens=500)
    stepping = threading.Thread(target=served.steps, args=(100, 0.005))
    stepping.start()
    closing = threading.Timer(0.4, served.server.close)
    closing.start()
    code, text = run_cli(served.address, "--json", "--watch")
    stepping.join()
    closing.join()
    ids = [json.loads(line)["step_id"] for line in text.splitlines()]
    assert code == 0
    assert len(ids) > 10
    assert ids == list(range(ids[0], ids[0] + len(ids)))


def test_the_command_shows_a_request_or_says_in_one_line_what_is_wrong(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_cli, "FIRST_S", 0.2)
    code, text = run_cli(served.address)
    assert (code, text.count("\n")) == (1, 1)
    assert "nothing came in time" in text
    request = served.ask()
    served.steps(5)
    code, text = run_cli(served.address, "--request", str(request.request_id))
    assert code == 0
    assert "ttft_ms" in text
    for wrong in ([served.address, "--request", "77"], ["unix:/no/such.sock"], ["x"]):
        code, text = run_cli(*wrong)
        assert (code, text.count("\n")) == (1, 1), text
