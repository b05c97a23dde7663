"""Learning that is shared through a real Redis: by halves, warm, and with the server at fault."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.faulty_line import FaultyLine
from tests.integration.redis_server import BINARY, RedisServer, running

from parlay.controller.host import Host
from parlay.controller.session import Session
from parlay.controller.sharing import Sharing
from parlay.controller.slot import decode, encode
from parlay.controller.store import Scope, open_store
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.policies.acceptance import Acceptance
from parlay.policies.counts import Counts
from parlay.policies.policy import Policy, make_policy
from parlay.policies.shared_stats import Pool, acceptance_of
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import Array, StepOutcome
from parlay.protos.codec import Hello

pytestmark = [
    pytest.mark.skipif(BINARY is None, reason="no redis-server binary: apt-get install it"),
    pytest.mark.slow,
]
WAIT_S = 20.0
FIRST_OF = 1_000_000
"""Request ids of one engine's requests are so far from another's."""


class Replica:
    """A controller with one engine, driven from the test's thread as its loop would."""

    def __init__(
        self, url: str, engine: int, policy: str = "goodput", data: int = -1, **options: float
    ) -> None:
        self.host = Host(policy)
        self.sharing = Sharing(open_store(url), period_s=0.05, **options)  # type: ignore[arg-type]
        self.session, _ = self.host.hello(Hello(f"engine-{engine}", LIMITS), 1)
        self.history = History(16, seed=engine if data < 0 else data)
        self.engine, self.slowest_s = engine, 0.0

    @property
    def acceptance(self) -> Acceptance:
        return counts_of(self.session.policy)

    @property
    def pool(self) -> Pool:
        found = self.sharing._members[self.session.engine_id].pool
        assert found is not None
        return found

    @property
    def others(self) -> float:
        """Return what is decided on that others counted, in exposed rows."""
        return float(self.acceptance.others[1].sum())

    def swap(self) -> None:
        began_s = time.monotonic()
        self.sharing.swap(self.host.sessions)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    def learn(self, steps: int) -> list[StepOutcome]:
        """Run steps whose drafts do not hang on what is known; return their outcomes."""
        outcomes = []
        for _ in range(steps):
            outcomes.append(shifted(drafted(self.history), self.engine))
            self.host.observe(self.session, outcomes[-1])
        return outcomes

    def close(self) -> None:
        self.sharing.close()
        assert not self.sharing._thread.is_alive()


def drafted(history: History) -> StepOutcome:
    """Run a step that drafts 0 to 8 tokens with the n-gram or the draft model, at random."""
    rng = np.random.default_rng((history.seed, history.step_id))
    plan = make_policy("fixed", {"k": "8", "proposer": "draft_model"}, LIMITS).decide(
        history.view()
    )
    plan.k[:] = rng.integers(0, 9, len(plan))
    plan.proposer[:] = np.where(plan.k > 0, rng.integers(1, 3, len(plan)), 0)
    return history.step(plan)


def shifted(outcome: StepOutcome, engine: int) -> StepOutcome:
    by = np.uint64(FIRST_OF * engine)
    shadow = replace(outcome.shadow, request_id=outcome.shadow.request_id + by)
    return replace(outcome, request_id=outcome.request_id + by, shadow=shadow)


@contextmanager
def replicas(*made: Replica) -> Iterator[None]:
    try:
        yield
    finally:
        for replica in made:
            replica.close()


def wait_for(condition: Callable[[], bool], *swapped: Replica, limit_s: float = WAIT_S) -> float:
    """Swap until the condition holds; return how long that took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, [r.sharing.counts for r in swapped]
        for replica in swapped:
            replica.swap()
        time.sleep(0.01)
    return time.monotonic() - began_s


def meet(*swapped: Replica) -> None:
    """Let every replica hear what every other one counted until now."""
    for _ in range(2):
        before = [r.sharing.counts.exchanges for r in swapped]
        wait_for(
            lambda before=before: all(  # type: ignore[misc]
                r.sharing.counts.exchanges > n + 1 for r, n in zip(swapped, before, strict=True)
            ),
            *swapped,
        )
        time.sleep(0.06)
        for replica in swapped:
            replica.swap()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running(tmp_path) as found:
        yield found


# --- Learning by halves --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["goodput", "pilot"])
def test_two_that_saw_half_each_decide_as_one_that_saw_all(
    server: RedisServer, policy: str
) -> None:
    one, two = Replica(server.url, 1, policy), Replica(server.url, 2, policy)
    lonely, everything = make_policy(policy, {}, LIMITS), make_policy(policy, {}, LIMITS)
    with replicas(one, two):
        meet(one, two)
        for _ in range(20):
            for outcome, other in zip(one.learn(5), two.learn(5), strict=True):
                lonely.observe(outcome)
                for number, of in enumerate((outcome, other)):
                    everything.observe(replace(of, step_id=2 * of.step_id + number))
            meet(one, two)
    known, clock = counts_of(everything), everything.state()
    wanted = decisions(Pool(known).pooled(), clock)
    seen = known.exposed > 20.0
    assert (wanted[1] > 0).mean() > 0.5
    for replica in (one, two):
        found = decisions(replica.pool.pooled(), clock)
        assert (found == wanted).all(axis=0).mean() > 0.97
        assert _off(replica.acceptance.hazard, known.hazard, seen) < 0.05
        mass = replica.acceptance.exposed.sum() + replica.others
        assert mass == pytest.approx(known.exposed.sum(), rel=0.1)
    half = counts_of(lonely)
    assert (decisions(Pool(half).pooled(), clock) == wanted).all(axis=0).mean() < 0.93
    assert _off(half.hazard, known.hazard, seen) > 0.08


def counts_of(policy: Policy) -> Acceptance:
    found = acceptance_of(policy)
    assert found is not None
    return found


def decisions(counts: Counts, clock: Mapping[str, Array]) -> Array:
    """Return proposer and k [2, rows] for batches of requests that nobody has seen, by `counts`.

    What a step takes each replica learns where it runs; here all go by what the state `clock` says.
    """
    policy = make_policy("goodput", {}, LIMITS)
    times = {n[n.index("cost.") :]: array for n, array in clock.items() if "cost." in n}
    policy.load(policy.state() | times)
    counts_of(policy).join(counts_of(policy).counted(), counts)
    views = [History(16, seed).view() for seed in range(100, 120)]
    by = np.uint64(50 * FIRST_OF)
    plans = [policy.decide(replace(v, request_id=v.request_id + by)) for v in views]
    return np.concatenate([np.stack([plan.proposer, plan.k]) for plan in plans], axis=1)


def _off(found: Array, wanted: Array, seen: Array) -> float:
    return float(np.abs(found[seen] / wanted[seen] - 1.0).max())


def test_nothing_is_counted_twice_however_often_they_meet(server: RedisServer) -> None:
    one, two = Replica(server.url, 1), Replica(server.url, 2)
    with replicas(one, two):
        meet(one, two)
        one.learn(20)
        two.learn(20)
        own = one.acceptance.exposed.sum() + two.acceptance.exposed.sum()
        meet(one, two)
        first = one.acceptance.exposed.sum() + one.others
        for _ in range(5):
            meet(one, two)
        assert one.acceptance.exposed.sum() + one.others == pytest.approx(first, rel=1e-6)
        assert two.acceptance.exposed.sum() + two.others == pytest.approx(first, rel=1e-6)
        assert first < own


def test_scopes_do_not_mix(server: RedisServer) -> None:
    made = [
        Replica(server.url, 1),
        Replica(server.url, 2, tenant="other"),  # type: ignore[arg-type]
        Replica(server.url, 3, model="other"),  # type: ignore[arg-type]
        Replica(server.url, 4, "pilot"),
    ]
    with replicas(*made):
        for replica in made:
            replica.learn(10)
        meet(*made)
        assert [replica.others for replica in made] == [0.0] * 4
        assert len(list(server.client().scan_iter("parlay:*:writers"))) == 4


def test_one_that_ends_fades_and_is_gone(server: RedisServer) -> None:
    one, two = Replica(server.url, 1), Replica(server.url, 2)
    with replicas(one):
        with replicas(two):
            two.learn(20)
            meet(one, two)
            known = one.others
            assert known > 0.0
        time.sleep(3.0)
        meet(one)
        assert 0.8 * known < one.others < known
        one.learn(200)
        meet(one)
        assert one.others < 0.3 * known
        (slot,) = server.client().scan_iter("parlay:*:slot:engine-2@*")
        server.client().pexpire(slot, 1)
        meet(one)
        (writers,) = server.client().scan_iter("parlay:*:writers")
        assert not [w for w in server.client().smembers(writers) if b"engine-2" in bytes(w)]  # type: ignore[arg-type]


# --- A new replica -------------------------------------------------------------------------------


def test_a_new_replica_starts_warm(server: RedisServer) -> None:
    one = Replica(server.url, 1)
    with replicas(one):
        one.learn(120)
        meet(one)
        wanted = one.acceptance.hazard.copy()
    for slots_left in (True, False):
        if not slots_left:
            for key in server.client().scan_iter("parlay:*:slot:*"):
                server.client().delete(key)
        two = Replica(server.url, 7 + slots_left)
        cold = two.acceptance.hazard.copy()
        with replicas(two):
            two.swap()
            took_s = wait_for(lambda: two.others > 0.0, two)  # noqa: B023
            assert took_s < 1.0
            seen = one.acceptance.exposed > 20.0
            assert _off(two.acceptance.hazard, wanted, seen) < 0.15
            assert _off(cold, wanted, seen) > 0.5
            assert two.sharing.counts.warmed == 1
            policy = two.session.policy
            np.testing.assert_array_equal(
                policy.state()["cost.verify"], one.session.policy.state()["cost.verify"]
            )
            assert not two.acceptance.exposed.any()


def test_the_same_engine_goes_on_after_its_controller_was_replaced(server: RedisServer) -> None:
    one = Replica(server.url, 1)
    with replicas(one):
        one.learn(60)
        meet(one)
        total = one.acceptance.exposed.sum()
    again = Replica(server.url, 1)
    with replicas(again):
        meet(again)
        known = again.acceptance.exposed.sum() + again.others
        assert known == pytest.approx(total, rel=0.1)
        last = again.session.policy.state()["acceptance.request_id"]
        np.testing.assert_array_equal(last, one.session.policy.state()["acceptance.request_id"])


def test_a_policy_that_cannot_be_merged_is_taken_whole(server: RedisServer) -> None:
    one = Replica(server.url, 1, "hedge_spec")
    with replicas(one):
        for _ in range(20):
            plan = one.host.decide(one.session, one.history.view())
            one.host.observe(one.session, one.history.step(plan))
        wait_for(lambda: one.sharing.counts.exchanges > 1, one)
    two = Replica(server.url, 2, "hedge_spec")
    with replicas(two):
        wait_for(lambda: two.sharing.counts.warmed == 1, two)
        for name, array in one.session.policy.state().items():
            np.testing.assert_array_equal(array, two.session.policy.state()[name])


# --- The server at fault -------------------------------------------------------------------------


def _work(replica: Replica, seconds: float) -> None:
    """Decide, learn and swap for a while: nothing may raise, nothing may wait."""
    deadline_s = time.monotonic() + seconds
    replica.slowest_s = 0.0
    while time.monotonic() < deadline_s:
        plan = replica.host.decide(replica.session, replica.history.view())
        replica.host.observe(replica.session, replica.history.step(plan))
        replica.swap()
    assert replica.slowest_s < 0.15
    assert replica.sharing._thread.is_alive()


@pytest.mark.parametrize("fault", ["killed", "hung", "flushed", "slow"])
def test_decisions_go_on_and_learning_is_merged_again(server: RedisServer, fault: str) -> None:
    line = FaultyLine(server.port)
    line.delay_s = 0.005
    url = f"redis://127.0.0.1:{line.port}"
    one, two = Replica(url, 1), Replica(url, 2)
    with closing(line), replicas(one, two):
        one.learn(10)
        two.learn(10)
        meet(one, two)
        assert one.others > 0.0
        if fault == "killed":
            server.kill()
        elif fault == "hung":
            server.send(signal.SIGSTOP)
        elif fault == "flushed":
            server.client().flushall()
        else:
            line.delay_s = 0.25
        for replica in (one, two):
            _work(replica, 1.5)
        if fault != "flushed":
            assert one.sharing.counts.failures > 0
            assert one.sharing.counts.last_error
            failures, exchanges = one.sharing.counts.failures, one.sharing.counts.exchanges
            _work(one, 1.0)
            assert one.sharing.counts.exchanges == exchanges
            assert one.sharing.counts.failures <= failures + 10
        if fault == "killed":
            server.restart()
        elif fault == "hung":
            server.send(signal.SIGCONT)
        line.delay_s = 0.005
        before = [r.sharing.counts.exchanges for r in (one, two)]
        took_s = wait_for(
            lambda: (
                all(r.sharing.counts.exchanges > n for r, n in zip((one, two), before, strict=True))
                and not one.sharing.counts.last_error
            ),
            *(one, two),
        )
        assert took_s < 2.0
        one.acceptance.others[:] = 0.0
        two.learn(5)
        meet(one, two)
        assert one.others > 0.0


def test_a_server_that_is_not_there_yet(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.kill()
        one = Replica(server.url, 1)
        with replicas(one):
            _work(one, 0.5)
            assert one.sharing.counts.exchanges == 0
            server.restart()
            wait_for(lambda: one.sharing.counts.exchanges > 0, one, limit_s=5.0)


def test_damaged_and_foreign_slots_are_ignored_and_counted(server: RedisServer) -> None:
    one, two = Replica(server.url, 1), Replica(server.url, 2)
    with replicas(one, two):
        two.learn(10)
        meet(one, two)
        client = server.client()
        (mine,) = client.scan_iter("parlay:*:slot:engine-1@*")
        good = client.get(mine)
        assert isinstance(good, bytes)
        flipped = bytearray(good)
        flipped[-3] ^= 0x10
        other_version = bytearray(good)
        other_version[4] = 99
        for number, bad in enumerate(
            [b"", b"hello", good[:-8], bytes(flipped), bytes(other_version)]
        ):
            name = mine.replace(b"engine-1@", b"bad-%d@" % number)
            client.set(name, bad, px=60_000)
            client.sadd(mine.partition(b":slot:")[0] + b":writers", name.partition(b":slot:")[2])
        wrong = encode({"places": np.full((2, 10, 8), np.nan)})
        client.set(mine.replace(b"engine-1@", b"bad-0@"), wrong, px=60_000)
        before = one.sharing.counts.ignored_slots
        meet(one, two)
        assert one.sharing.counts.ignored_slots >= before + 5
        assert one.others == pytest.approx(float(two.acceptance.exposed.sum()), rel=1e-6)
        assert one.sharing.counts.failures == 0
        client.set(mine.partition(b":slot:")[0] + b":newest", b"rubbish", px=60_000)
        three = Replica(server.url, 3)
        with replicas(three):
            wait_for(lambda: three.others > 0.0, three)
            assert three.sharing.counts.warmed == 0


def test_a_key_of_another_kind_in_the_way_raises_nothing(server: RedisServer) -> None:
    one = Replica(server.url, 1)
    with replicas(one):
        meet(one)
        (writers,) = server.client().scan_iter("parlay:*:writers")
        server.client().delete(writers)
        server.client().set(writers, "a string")
        _work(one, 0.5)
        assert "WRONGTYPE" in one.sharing.counts.last_error
        server.client().delete(writers)
        wait_for(lambda: not one.sharing.counts.last_error, one, limit_s=5.0)


# --- Ways to run Redis ---------------------------------------------------------------------------

ACL = (
    "user default off",
    "user parlay on >s3cret/@ ~parlay:* resetchannels -@all +set +get +pttl +sadd +srem"
    " +smembers +pexpire +hello +select",
)


def _shared_through(url: str) -> None:
    one, two = Replica(url, 1), Replica(url, 2)
    with replicas(one, two):
        two.learn(10)
        wait_for(lambda: one.others > 0.0, one, two)
        assert one.sharing.counts.failures == 0, one.sharing.counts
        assert one.sharing.counts.writers == 2


def test_a_user_with_few_rights_is_enough(tmp_path: Path) -> None:
    with running(tmp_path, *ACL) as server:
        _shared_through(f"redis://parlay:s3cret%2F%40@127.0.0.1:{server.port}/0")
        wrong = Replica(f"redis://parlay:nonsense@127.0.0.1:{server.port}", 1)
        with replicas(wrong):
            _work(wrong, 0.3)
            assert wrong.sharing.counts.last_error
            assert "nonsense" not in wrong.sharing.counts.last_error


def test_tls_with_a_certificate_that_is_checked(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl binary to make a certificate with")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
            ),
            *("-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"),
            *("-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    options = (
        "tls-port PORT",
        f"tls-cert-file {cert}",
        f"tls-key-file {key}",
        f"tls-ca-cert-file {cert}",
    )
    with running(tmp_path, *options) as server:
        where = f"127.0.0.1:{server.port}"
        _shared_through(f"rediss://{where}?ca={cert}&cert={cert}&key={key}&timeout_ms=1000")
        untrusted = Replica(f"rediss://{where}", 1)
        with replicas(untrusted):
            _work(untrusted, 0.5)
            assert untrusted.sharing.counts.exchanges == 0
            assert "CERTIFICATE_VERIFY_FAILED" in untrusted.sharing.counts.last_error


def test_a_cluster(tmp_path: Path) -> None:
    with running(tmp_path, "cluster-enabled yes", "cluster-require-full-coverage no") as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        deadline_s = time.monotonic() + WAIT_S
        while b"cluster_state:ok" not in server.ask("CLUSTER", "INFO"):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        url = f"redis+cluster://127.0.0.1:{server.port}"
        _shared_through(url)
        one = Replica(url, 1)
        with replicas(one):
            wait_for(lambda: one.sharing.counts.exchanges > 0, one)
            server.kill()
            _work(one, 1.0)
            assert one.sharing.counts.last_error
            server.restart()
            wait_for(lambda: not one.sharing.counts.last_error, one, limit_s=8.0)


def _cluster_of(*nodes: RedisServer) -> None:
    """Let nodes know each other, and share the slots evenly."""
    first = nodes[0]
    for place, node in enumerate(nodes):
        low, high = (16384 * at // len(nodes) for at in (place, place + 1))
        node.ask("CLUSTER", "ADDSLOTSRANGE", low, high - 1)
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", place + 1)
        if node is not first:
            node.ask("CLUSTER", "MEET", "127.0.0.1", first.port)
    deadline_s = time.monotonic() + WAIT_S
    while any(
        b"cluster_state:ok" not in (said := node.ask("CLUSTER", "INFO"))
        or b"cluster_known_nodes:%d" % len(nodes) not in said
        for node in nodes
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_cluster_of_three_and_one_of_them_away(tmp_path: Path) -> None:
    options = (
        "cluster-enabled yes",
        "cluster-require-full-coverage no",
        "cluster-node-timeout 1000",
    )
    with ExitStack() as stack:
        nodes = [stack.enter_context(running(tmp_path, *options)) for _ in range(3)]
        _cluster_of(*nodes)
        url = f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}"
        _shared_through(url)
        scopes = [Scope(f"tenant-{n}", "m", 1, "goodput", 8) for n in range(12)]
        store = open_store(url)
        stack.callback(store.close)
        mine = {(scope, "me"): b"x" for scope in scopes}
        assert all(held["me"].data == b"x" for held in store.exchange(mine).values())
        used = [len(list(node.client().scan_iter("parlay:*:slot:me"))) for node in nodes]
        assert sum(used) == len(scopes)
        assert all(used), "the scopes do not lie on every node"

        holder = next(
            n for n in nodes if list(n.client().scan_iter("parlay:*default/default/*:writers"))
        )
        one, two = Replica(url, 1), Replica(url, 2)
        with replicas(one, two):
            meet(one, two)
            holder.kill()
            _work(one, 1.5)
            assert one.sharing.counts.failures > 0
            two.learn(5)
            holder.restart()
            wait_for(
                lambda: not (one.sharing.counts.last_error or two.sharing.counts.last_error),
                *(one, two),
            )
            meet(one, two)
            assert one.others > 0.0


@pytest.mark.slow
def test_a_cluster_whose_replica_takes_over(tmp_path: Path) -> None:
    options = (
        "cluster-enabled yes",
        "cluster-require-full-coverage no",
        "cluster-node-timeout 500",
    )
    with ExitStack() as stack:
        nodes = [stack.enter_context(running(tmp_path, *options)) for _ in range(3)]
        _cluster_of(*nodes)
        url = f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}"
        one, two = Replica(url, 1), Replica(url, 2)
        with replicas(one, two):
            meet(one, two)
            holder = next(n for n in nodes if list(n.client().scan_iter("parlay:*:writers")))
            heir = stack.enter_context(running(tmp_path, *options))
            _replicate(heir, holder)
            holder.kill()
            failures = one.sharing.counts.failures
            wait_for(lambda: one.sharing.counts.failures > failures, one, two)
            two.learn(5)
            wait_for(lambda: heir.client().info("replication")["role"] == "master", one, two)
            wait_for(
                lambda: not (one.sharing.counts.last_error or two.sharing.counts.last_error),
                *(one, two),
            )
            meet(one, two)
            assert one.others > 0.0
            assert list(heir.client().scan_iter("parlay:*:slot:*"))
            assert holder.process.poll() is not None


def _replicate(heir: RedisServer, holder: RedisServer) -> None:
    """Let a new node follow one of a cluster, until it has all that the other has."""
    heir.ask("CLUSTER", "MEET", "127.0.0.1", holder.port)
    known, deadline_s = holder.ask("CLUSTER", "MYID"), time.monotonic() + WAIT_S
    while known not in heir.ask("CLUSTER", "NODES"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    heir.ask("CLUSTER", "REPLICATE", known)
    while heir.client().info("replication").get("master_link_status") != "up":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_sentinels_find_the_server_that_took_over(tmp_path: Path) -> None:
    with running(tmp_path) as first, running(tmp_path, f"replicaof 127.0.0.1 {first.port}") as heir:
        deadline_s = time.monotonic() + WAIT_S
        while heir.client().info("replication")["master_link_status"] != "up":
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        watch = (
            f"sentinel monitor shared 127.0.0.1 {first.port} 1",
            "sentinel down-after-milliseconds shared 500",
            "sentinel failover-timeout shared 3000",
        )
        with running(tmp_path, *watch, sentinel=True) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/shared/0"
            _shared_through(url)
            one, two = Replica(url, 3), Replica(url, 4)
            with replicas(one, two):
                meet(one, two)
                # The Sentinel hears of replicas every ten seconds.
                while not sentinel.ask("SENTINEL", "REPLICAS", "shared"):
                    assert time.monotonic() < deadline_s + WAIT_S
                    time.sleep(0.1)
                first.kill()
                _work(one, 1.0)
                assert one.sharing.counts.failures > 0
                two.learn(5)
                wait_for(
                    lambda: not (one.sharing.counts.last_error or two.sharing.counts.last_error),
                    *(one, two),
                )
                meet(one, two)
                assert one.others > 0.0
                assert list(heir.client().scan_iter("parlay:*:slot:*"))


def test_no_server_is_left_behind(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        pid = server.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_memory_shares_between_the_engines_of_one_controller() -> None:
    host = Host("goodput")
    sharing = Sharing(open_store("memory"), period_s=0.02)
    sessions: list[Session] = [host.hello(Hello(name, LIMITS), 1)[0] for name in ("a", "b")]
    history = History(16)
    for _ in range(10):
        host.observe(sessions[0], drafted(history))
    found = acceptance_of(sessions[1].policy)
    assert found is not None
    deadline_s = time.monotonic() + WAIT_S
    while not found.others.any():
        assert time.monotonic() < deadline_s
        sharing.swap(host.sessions)
        time.sleep(0.005)
    sharing.close()


# --- `parlay serve` ------------------------------------------------------------------------------


class Serving:
    """A `parlay serve` process with an engine at it, on a unix socket in the folder."""

    def __init__(self, folder: Path, engine: str, *options: str) -> None:
        target = f"unix:{folder}/{engine}.sock"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "parlay.controller", "--listen", target),
                *("--policy", "goodput", *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert "serving on" in self.process.stdout.readline()
        self.planner = RemotePlanner(
            target, EngineInfo(engine, LIMITS), LocalPlanner(make_policy("none"))
        )
        self.history = History(8)

    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan, source = self.planner.plan(self.history.view())
            self.planner.observe(self.history.step(plan, source))
            time.sleep(0.01)

    def stop(self) -> str:
        self.planner.close()
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, errors
        return errors


def test_sidecars_share_and_outlive_a_server_that_is_killed(
    server: RedisServer, tmp_path: Path
) -> None:
    state = ("--state", server.url, "--tenant", "t", "--model", "m")
    one, two = Serving(tmp_path, "one", *state), Serving(tmp_path, "two", *state)
    for _ in range(2):
        one.step(40)
        two.step(40)
    found = sorted(bytes(k) for k in server.client().scan_iter("parlay:*:slot:*"))
    assert [key.split(b"@")[0].split(b":")[-1] for key in found] == [b"one", b"two"]
    assert found[0].startswith(b"parlay:1:{t/m/p7/goodput/k8/s1}:slot:")
    server.kill()
    one.step(60)
    assert one.process.poll() is None
    server.restart()
    deadline_s = time.monotonic() + WAIT_S
    while len(list(server.client().scan_iter("parlay:*:slot:*"))) < 2:
        assert time.monotonic() < deadline_s
        one.step(5)
        two.step(5)
    for serving in (one, two):
        errors = serving.stop()
        assert "Traceback" not in errors
        assert errors.count("state is not shared for now") == 1
    assert list(server.client().scan_iter("parlay:*:own:one"))


def test_a_sidecar_keeps_its_state_in_a_file(tmp_path: Path) -> None:
    state = ("--state", f"file:{tmp_path / 'state'}")
    serving = Serving(tmp_path, "one", *state)
    serving.step(60)
    serving.stop()
    store = open_store(state[1])
    scope = Scope("default", "default", LIMITS.proposer_mask, "goodput", LIMITS.k_max)
    found = store.saved(scope, "one")
    store.close()
    assert found is not None
    assert int(decode(found[0].data)["acceptance.version"]) > 30


@pytest.mark.parametrize("url", ["redis://:secret@host:port", "file:/no/such/folder/x", "ftp://x"])
def test_a_sidecar_refuses_a_wrong_state_in_one_line(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parlay.controller", "--listen", "127.0.0.1:0", "--state", url],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("parlay serve: ")
    assert "secret" not in done.stderr
