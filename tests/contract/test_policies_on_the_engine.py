"""Every policy steers the engine alike in process and over the wire; none changes a token."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from tests.contract.test_policies_over_grpc import served

from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.request import SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.policy import EngineLimits, make_policy, registry
from parlay.policies.types import Proposer, StepOutcome

LIMITS = EngineLimits(0b0111, 8, (), 64)
TASKS = {
    "edit": Task({Proposer.NGRAM: (0.8, 0.9), Proposer.DRAFT_MODEL: (0.7,)}, match_rate=0.8),
    "chat": Task({Proposer.NGRAM: (0.4, 0.5), Proposer.DRAFT_MODEL: (0.5, 0.6)}, match_rate=0.2),
}
DECIDED = ("proposer", "requested_k", "drafted_k", "verified_k", "accepted", "emitted")


def decode(planner: Planner) -> tuple[list[StepOutcome], list[list[int]]]:
    backend = VirtualBackend(Hazards(TASKS, seed=5), engine=LIMITS)
    engine = Engine(backend, planner, EngineConfig(max_running=4, token_budget=64))
    requests = [
        engine.add(
            list(range(1, 30 + 9 * i)),
            SamplingParams(max_tokens=40),
            SpeculationParams(task=sorted(TASKS)[i % 2]),
        )
        for i in range(8)
    ]
    outcomes = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        outcomes.append(outcome)
    return outcomes, [r.output for r in requests]


@pytest.mark.parametrize("policy", sorted(registry()))
def test_the_engine_does_the_same_in_process_and_over_the_wire(policy: str) -> None:
    ours, texts = decode(LocalPlanner(make_policy(policy, None, LIMITS)))
    fallback = LocalPlanner(make_policy("none"))
    with served(policy) as target:
        info = EngineInfo("contract", LIMITS)
        with contextlib.closing(RemotePlanner(target, info, fallback, synchronous=True)) as planner:
            theirs, their_texts = decode(planner)
            assert planner.stats.plans_local == 0
    assert texts == their_texts == decode(LocalPlanner(make_policy("none")))[1]
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        for name in DECIDED:
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
