"""A sidecar that freezes or dies under SGLang's adaptive policy leaves it lengths that it knows."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from parlay.engine.plugins.adapter import Adapter
from parlay.engine.plugins.settings import read_settings
from parlay.engine.plugins.sglang_steps import BatchSteps
from parlay.policies.policy import EngineLimits
from parlay.policies.types import DRAFT_MODEL, NONE, PlanSource

STEPS = (0, 1, 3, 7)
REMOTE = ("--policy", "fixed", "--set", "proposer=draft_model", "--set", "k=3")
LOCAL = {"PARLAY_POLICY": "fixed", "PARLAY_SET": "proposer=draft_model k=1"}
ROUND, ROUNDS = 200, 100


@pytest.fixture
def service() -> Iterator[Any]:
    from tests.sidecars import running

    with (
        tempfile.TemporaryDirectory(prefix="parlay-") as folder,
        running(f"unix:{folder}/sidecar.sock", *REMOTE) as sidecar,
    ):
        yield sidecar


@pytest.mark.slow
def test_faults_of_the_sidecar_leave_steps_that_sglang_has(service: Any) -> None:
    limits = EngineLimits(1 << NONE | 1 << DRAFT_MODEL, max(STEPS))
    settings = read_settings(environ={**LOCAL, "PARLAY_SIDECAR": service.target})
    ticks = itertools.count()
    steps = BatchSteps(Adapter("sglang", limits, settings), clock=lambda: 1e-2 * next(ticks))
    counters = steps.adapter.counters

    def some() -> set[int]:
        chosen = set()
        for _ in range(ROUND):
            k = steps.steps(4, STEPS)
            chosen.add(k)
            steps.verified([k, 0, min(k, 1), 0], 4)
        return chosen

    def until(source: PlanSource) -> set[int]:
        before = counters.plans[source]
        for _ in range(ROUNDS):
            chosen = some()
            if counters.plans[source] > before:
                return chosen
        raise AssertionError(f"no plan of {source!r} came")

    try:
        assert until(PlanSource.REMOTE) <= {1, 3}
        service.freeze()
        assert until(PlanSource.LOCAL) <= {1, 3}
        assert some() == {1}, "a plan of the frozen sidecar's goes on for ever"
        service.thaw()
        service.kill()
        assert until(PlanSource.LOCAL) <= {1, 3}
        service.start()
        assert until(PlanSource.REMOTE) <= {1, 3}
        assert counters.errors == 0
    finally:
        steps.close()
