"""A sidecar whose Redis is killed, hung, flushed or replaced goes on steering, and shares again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.redis_server import BINARY, RedisServer
from tests.integration.redis_server import running as redis_running
from tests.load import RECOVERED_S, WAIT_S, Steered, steered
from tests.sidecars import running

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server binary: apt-get install it")


@contextmanager
def sharing(folder: Path, state: str) -> Iterator[Steered]:
    """Run an engine whose sidecar shares through `state`; it must be steered all along."""
    with (
        running(f"unix:{folder}/s.sock", "--policy", "goodput", "--state", state) as sidecar,
        steered(sidecar.target) as load,
    ):
        yield load
        stats = load.planner.stats
        assert stats.endings.total() == 0
        assert stats.plans_remote > 8 * stats.plans_local
    assert sum("state is not shared for now" in line for line in sidecar.errors) <= 1


def slots(server: RedisServer) -> list[object]:
    return list(server.client().scan_iter("parlay:*:slot:*"))


def shared(load: Steered, server: RedisServer, limit_s: float = WAIT_S) -> None:
    """Step until the sidecar has written what it counted; fail where that takes too long."""
    client = server.client()
    for slot in slots(server):
        client.delete(slot)  # type: ignore[arg-type]
    load.until(lambda: bool(slots(server)), limit_s)
    client.close()


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("killed", 0.8),
        pytest.param("killed", 5.0, marks=pytest.mark.slow),
        pytest.param("hung", 5.0, marks=pytest.mark.slow),
        pytest.param("flushed", 1.0, marks=pytest.mark.slow),
    ],
)
def test_its_redis_at_fault(folder: Path, fault: str, seconds: float) -> None:
    harm: dict[str, Callable[[RedisServer], object]] = {
        "killed": lambda server: server.kill(),
        "hung": lambda server: server.send(signal.SIGSTOP),
        "flushed": lambda server: server.client().flushall(),
    }
    with redis_running(folder) as server, sharing(folder, server.url) as load:
        shared(load, server)
        harm[fault](server)
        remote, local = load.run(seconds)
        assert remote > 8 * local
        if fault == "killed":
            server.restart()
        elif fault == "hung":
            server.send(signal.SIGCONT)
        shared(load, server, RECOVERED_S)


@pytest.mark.slow
def test_its_redis_replaced_by_a_replica(folder: Path) -> None:
    with (
        redis_running(folder) as first,
        redis_running(folder, f"replicaof 127.0.0.1 {first.port}") as heir,
        redis_running(
            folder,
            f"sentinel monitor shared 127.0.0.1 {first.port} 1",
            "sentinel down-after-milliseconds shared 500",
            "sentinel failover-timeout shared 3000",
            sentinel=True,
        ) as sentinel,
    ):
        deadline_s = time.monotonic() + WAIT_S
        # The Sentinel hears of replicas every ten seconds.
        while not sentinel.ask("SENTINEL", "REPLICAS", "shared"):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        state = f"redis+sentinel://127.0.0.1:{sentinel.port}/shared/0"
        with sharing(folder, state) as load:
            shared(load, first)
            first.kill()

            def promoted() -> bool:
                found = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shared")
                return int(found[1]) == heir.port

            load.until(promoted)
            shared(load, heir, RECOVERED_S)
