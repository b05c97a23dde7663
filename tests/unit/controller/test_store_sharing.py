"""Sharing between engines: swapped in whole, started warm, and undisturbed by a store at fault."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from parlay.controller import sharing as sharing_module
from parlay.controller.host import Host
from parlay.controller.session import Session
from parlay.controller.sharing import Sharing
from parlay.controller.slot import encode
from parlay.controller.snapshot import MemoryStore
from parlay.controller.store import Held, Scope, Store, StoreError, open_store
from parlay.policies.acceptance import Acceptance
from parlay.policies.shared_stats import acceptance_of
from parlay.policies.synthetic import LIMITS, History
from parlay.protos.codec import Hello

WAIT_S = 10.0
PERIOD_S = 0.01


SILENT = "state is not shared for now, and is once the store answers: StoreError: gone"


class Faulty(MemoryStore):
    """Memory that does as `fault` does before every exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[], None] = lambda: None

    def exchange(self, mine: Mapping[tuple[Scope, str], bytes]) -> dict[Scope, dict[str, Held]]:
        self.fault()
        return super().exchange(mine)


def controller(store: Store, *engines: str, policy: str = "goodput") -> tuple[Host, Sharing]:
    host = Host(policy)
    for engine in engines:
        host.hello(Hello(engine, LIMITS), host.new_stream())
    return host, Sharing(store, period_s=PERIOD_S)


def learn(host: Host, engine: str, steps: int = 10) -> None:
    session, history = host.sessions[engine], History(8)
    for _ in range(steps):
        plan = host.decide(session, history.view())
        host.observe(session, history.step(plan))


def counts(session: Session) -> Acceptance:
    found = acceptance_of(session.policy)
    assert found is not None
    return found


def swap_until(condition: Callable[[], bool], host: Host, sharing: Sharing) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, sharing.counts
        began_s = time.monotonic()
        sharing.swap(host.sessions)
        assert time.monotonic() - began_s < 0.2
        time.sleep(0.002)


def knows_others(session: Session) -> bool:
    return bool(counts(session).others.any())


@pytest.fixture
def store() -> Faulty:
    return Faulty()


def test_engines_of_one_controller_learn_together(store: Faulty) -> None:
    host, sharing = controller(store, "a", "b")
    learn(host, "a")
    swap_until(lambda: knows_others(host.sessions["b"]), host, sharing)
    np.testing.assert_allclose(
        counts(host.sessions["b"]).others[0], counts(host.sessions["a"]).rejected
    )
    assert not knows_others(host.sessions["a"])
    sharing.close()
    assert sharing.counts.failures == sharing.counts.ignored_slots == 0


def test_calls_come_between_two_engines(store: Faulty) -> None:
    host, sharing = controller(store, *(f"e{n}" for n in range(20)))
    longest_s = 0.0

    async def serve() -> None:
        nonlocal longest_s
        task = asyncio.create_task(sharing.run(host.sessions))
        for _ in range(150):
            began_s = time.monotonic()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.001)
        task.cancel()

    learn(host, "e0")
    asyncio.run(serve())
    sharing.close()
    assert all(knows_others(host.sessions[f"e{n}"]) for n in range(1, 20))
    assert longest_s < 0.1


def test_whatever_a_store_does_decisions_go_on(store: Faulty) -> None:
    host, sharing = controller(store, "a", "b")
    release = threading.Event()
    faults: list[Callable[[], None]] = [
        _raiser(StoreError("gone")),
        _raiser(OSError("broken pipe")),
        _raiser(KeyError("a bug of the store")),
        lambda: _wait(release),
    ]
    for fault in faults:
        store.fault = fault
        time.sleep(3 * PERIOD_S)
        learn(host, "a", 3)
        sharing.swap(host.sessions)
    assert sharing.counts.failures >= 1
    store.fault = lambda: None
    release.set()
    swap_until(lambda: knows_others(host.sessions["b"]), host, sharing)
    assert sharing.counts.last_error == ""
    sharing.close()


def _wait(release: threading.Event) -> None:
    release.wait(WAIT_S)


def _raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_store_that_fails_is_asked_less_and_complained_of_once(
    store: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    host, sharing = controller(store, "a")
    store.fault = _raiser(StoreError("gone"))
    swap_until(lambda: sharing.counts.failures >= 4, host, sharing)
    failures = sharing.counts.failures
    time.sleep(0.1)
    assert sharing.counts.failures <= failures + 2
    assert [r.message for r in caplog.records] == [SILENT]
    store.fault = lambda: None
    swap_until(lambda: sharing.counts.last_error == "", host, sharing)
    assert caplog.records[-1].message == "state is shared again"
    sharing.close()


def test_a_store_that_is_away_is_said_before_any_engine_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(Faulty):
        def saved(self, scope: Scope, engine_id: str) -> tuple[Held, bool] | None:
            raise StoreError("gone")

    sharing = Sharing(Away(), period_s=PERIOD_S, ask=True)
    sharing.close()
    assert [r.message for r in caplog.records] == [SILENT]


def test_closing_does_not_wait_for_a_store_that_hangs(
    store: Faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing_module, "CLOSE_S", 0.2)
    host, sharing = controller(store, "a")
    release = threading.Event()
    store.fault = lambda: _wait(release)
    sharing.swap(host.sessions)
    time.sleep(5 * PERIOD_S)
    began_s = time.monotonic()
    sharing.close()
    assert time.monotonic() - began_s < 1.0
    assert "the store is silent" in caplog.text
    release.set()


def test_slots_that_do_not_fit_are_counted(store: Faulty) -> None:
    host, sharing = controller(store, "a")
    learn(host, "a")
    swap_until(lambda: sharing.counts.exchanges > 0, host, sharing)
    (scope,) = store._slots
    store.exchange({(scope, "x"): b"rubbish", (scope, "y"): encode({"places": np.zeros(3)})})
    swap_until(lambda: sharing.counts.ignored_slots >= 2, host, sharing)
    assert not knows_others(host.sessions["a"])
    sharing.close()


def test_an_engine_that_left_is_no_longer_spoken_for(
    store: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "SILENT_S", 0.05)
    host, sharing = controller(store, "a", "b")
    learn(host, "a")
    swap_until(lambda: knows_others(host.sessions["b"]), host, sharing)
    host.leave(host.sessions["a"], host.sessions["a"].stream)
    time.sleep(0.06)
    sharing.swap(host.sessions)
    time.sleep(0.05)
    (scope,) = store._slots
    held = store.exchange({(scope, "x"): b""})[scope]
    ages = {writer.split("@")[0]: slot.age_s for writer, slot in held.items()}
    assert ages["a"] > ages["b"]
    assert ages["a"] > 0.04
    sharing.close()


@pytest.mark.parametrize("policy", ["goodput", "pilot", "hedge_spec"])
@pytest.mark.parametrize("engine", ["a", "another"])
def test_a_controller_that_starts_again_goes_on(tmp_path: Path, policy: str, engine: str) -> None:
    host, sharing = controller(open_store(f"file:{tmp_path / 'state'}"), "a", policy=policy)
    swap_until(lambda: sharing.counts.exchanges > 0, host, sharing)
    learn(host, "a", 40)
    sharing.close()
    old = host.sessions["a"].policy
    assert sharing.counts.saves == 1
    host, sharing = controller(open_store(f"file:{tmp_path / 'state'}"), engine, policy=policy)
    swap_until(lambda: sharing.counts.warmed == 1, host, sharing)
    new = host.sessions[engine].policy
    before, after = acceptance_of(old), acceptance_of(new)
    if before is None or after is None:
        for key, array in old.state().items():
            np.testing.assert_array_equal(new.state()[key], array)
    else:
        np.testing.assert_allclose(after.hazard, before.hazard, rtol=1e-3)
        known = set(before.state()["request_id"]) if engine == "a" else set()
        assert set(after.state()["request_id"]) == known
    sharing.close()


def test_a_policy_that_has_learned_is_not_loaded_over(tmp_path: Path) -> None:
    host, sharing = controller(open_store(f"file:{tmp_path / 'state'}"), "a")
    swap_until(lambda: sharing.counts.exchanges > 0, host, sharing)
    learn(host, "a", 5)
    sharing.close()
    host, sharing = controller(open_store(f"file:{tmp_path / 'state'}"), "a")
    learn(host, "a", sharing_module.WARM_STEPS + 1)
    swap_until(lambda: sharing.counts.exchanges > 1, host, sharing)
    assert sharing.counts.warmed == 0
    sharing.close()


def test_another_policy_of_the_same_engine_shares_with_its_own_kind(store: Faulty) -> None:
    host, sharing = controller(store, "a", "b")
    learn(host, "a")
    swap_until(lambda: knows_others(host.sessions["b"]), host, sharing)
    session = host.sessions["b"]
    session.spec = session.spec.__class__("pilot")
    session.policy = session.spec.make(LIMITS)
    exchanges = sharing.counts.exchanges
    swap_until(lambda: sharing.counts.exchanges > exchanges + 3, host, sharing)
    assert not knows_others(session)
    assert sorted(scope.policy for scope in store._slots) == ["goodput", "pilot"]
    sharing.close()


def test_a_policy_that_raises_is_left_alone(
    store: Faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, sharing = controller(store, "bad", "a", "b")
    learn(host, "a")

    def fail(*counts: object) -> None:
        raise RuntimeError("a bug of the policy")

    monkeypatch.setattr(counts(host.sessions["bad"]), "join", fail)
    swap_until(lambda: knows_others(host.sessions["b"]), host, sharing)
    swap_until(lambda: sharing.counts.failures == 1, host, sharing)
    learn(host, "bad", 3)
    sharing.close()
    assert sharing.counts.failures == 1
    assert caplog.text.count("no longer shared engine=bad") == 1
