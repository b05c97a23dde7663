"""Every policy decides the same in process and behind the sidecar's stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from parlay.controller.host import Host
from parlay.controller.service import serve
from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.policies.policy import make_policy, registry
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import Plan, PlanSource

STEPS = 80


@contextlib.contextmanager
def served(policy: str) -> Iterator[str]:
    """Serve a policy on a socket, in a thread of this process."""
    with tempfile.TemporaryDirectory(prefix="parlay-") as folder:
        loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        target = f"unix:{folder}/s.sock"
        work = serve(Host(policy), target, lambda _: ready.set(), stop, grace_s=0.0)
        thread = threading.Thread(target=loop.run_until_complete, args=(work,))
        thread.start()
        try:
            assert ready.wait(30)
            yield target
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(30)
            loop.close()


def run(planner: Planner, source: PlanSource, rows: int, seed: int) -> list[Plan]:
    history, plans = History(rows, seed), []
    for _ in range(STEPS):
        plan, told = planner.plan(history.view())
        assert plan is not None
        assert told is source
        plans.append(plan)
        planner.observe(history.step(plan, PlanSource.LOCAL))
    return plans


def assert_same(left: Any, right: Any, where: str) -> None:
    for item in dataclasses.fields(left):
        a, b, name = getattr(left, item.name), getattr(right, item.name), f"{where}.{item.name}"
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=name)
        elif dataclasses.is_dataclass(a):
            assert_same(a, b, name)
        elif isinstance(a, float):
            np.testing.assert_array_equal(np.float32(a), np.float32(b), err_msg=name)
        else:
            assert a == b, name


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("policy", sorted(registry()))
def test_the_same_decisions_over_the_wire_as_in_process(policy: str, rows: int) -> None:
    local = run(LocalPlanner(make_policy(policy, None, LIMITS)), PlanSource.LOCAL, rows, seed=3)
    fallback = LocalPlanner(make_policy("none"))
    with served(policy) as target:
        info = EngineInfo("contract", LIMITS)
        with contextlib.closing(RemotePlanner(target, info, fallback, synchronous=True)) as planner:
            remote = run(planner, PlanSource.REMOTE, rows, seed=3)
            assert planner.stats.plans_remote == STEPS
    for index, (ours, theirs) in enumerate(zip(local, remote, strict=True)):
        assert ours.step_id == index
        assert_same(ours, theirs, f"step {index}")


@pytest.mark.parametrize("policy", sorted(registry()))
def test_a_policy_says_which_step_its_plan_is_of(policy: str) -> None:
    history = History(3)
    made = make_policy(policy, None, LIMITS)
    for step_id in range(3):
        plan = made.decide(history.view())
        assert plan.step_id == step_id
        np.testing.assert_array_equal(plan.request_id, history.view().request_id)
        made.observe(history.step(plan))
