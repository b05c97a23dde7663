"""Prompts that begin alike: computed once, as far as the engine's cache holds them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from parlay.policies.policy import EngineLimits, Stateless, make_policy
from parlay.policies.types import BatchView, Plan, StepOutcome
from parlay.sim.backend import SimBackend
from parlay.sim.episode import run_episode
from parlay.sim.kinds import kinds_of
from parlay.sim.load import arrivals_of
from parlay.sim.prompts import prompt_of
from parlay.sim.scenario import Scenario, load_scenario
from parlay.sim.tally import Episode
from parlay.sim.workload import Arrival, describe

MINE = """
title = "Chat behind a long system prompt"
costs = "h200_8b"
steps = 120
warm_up_steps = 0
prefix_cache = true
shared_prefix = { share = 0.75, tokens = 1024 }
[[stage]]
concurrency = 8
mix = { chat = 1.0 }
"""


class Meter(Stateless):
    """Never drafts; adds up the prompt tokens that steps compute."""

    name = "meter"

    def __init__(self, limits: EngineLimits, backend: SimBackend) -> None:
        self.inner = make_policy("none", {}, limits)
        self.prompt_tokens = 0

    def decide(self, view: BatchView) -> Plan:
        return self.inner.decide(view)

    def observe(self, outcome: StepOutcome) -> None:
        self.prompt_tokens += outcome.prefill_tokens


def metered(scenario: Scenario, seed: int = 1) -> tuple[Episode, int]:
    made: list[Meter] = []

    def make(limits: EngineLimits, backend: SimBackend) -> Meter:
        made.append(Meter(limits, backend))
        return made[-1]

    episode = run_episode(scenario, make, arrivals_of(scenario), seed)
    return episode, made[0].prompt_tokens


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return load_scenario(str(path))


def test_prompts_are_alike_where_arrivals_share_and_nowhere_else() -> None:
    first = prompt_of(Arrival(0.0, "chat", 100, 5, 40), 0)
    other = prompt_of(Arrival(0.0, "chat", 90, 5, 60), 1)
    task = prompt_of(Arrival(0.0, "code", 90, 5, 60), 2)
    assert (len(first), len(other)) == (100, 90)
    assert first[:40] == other[:40]
    assert not set(first[40:]) & set(other[40:])
    assert not set(first) & set(task)
    blocks = [
        prompt_of(Arrival(0.0, "chat", 1500, 5, 0, names), i)
        for i, names in enumerate([(7, 8, 9), (7, 8, 1), (6, 8, 9)])
    ]
    same = [int((np.array(blocks[0]) == np.array(b)).argmin()) for b in blocks[1:]]
    assert same == [1024, 0]
    assert [len(b) for b in blocks] == [1500] * 3
    # A trace that names fewer blocks than the prompt is long: the rest is the request's own.
    assert len(prompt_of(Arrival(0.0, "chat", 1500, 5, 0, (7,)), 3)) == 1500


def test_a_share_of_requests_begins_with_the_same_text(scenario: Scenario) -> None:
    summary = describe(arrivals_of(scenario)(scenario.stages[0], 1), 4000)
    plain = dataclasses.replace(scenario, shared_prefix={})
    without = describe(arrivals_of(plain)(plain.stages[0], 1), 4000)
    assert without.shared_prefix_share == 0.0
    assert summary.prompt_p50 > without.prompt_p50 + 900
    assert 0.6 < summary.shared_prefix_share < 0.75


def test_what_is_shared_is_computed_once(scenario: Scenario) -> None:
    cold = dataclasses.replace(scenario, prefix_cache=False)
    (warm_run, warm_tokens), (cold_run, cold_tokens) = metered(scenario), metered(cold)
    assert warm_run.goodput > 1.02 * cold_run.goodput
    assert np.mean(warm_run.ttft_s) < np.mean(cold_run.ttft_s)
    assert warm_tokens < 0.6 * cold_tokens


def test_the_training_loop_leaves_out_what_is_cached(scenario: Scenario) -> None:
    kind = kinds_of(scenario, 0)[0]
    assert set(np.unique(kind.cached_tokens)) == {0, 1024}
    assert (kind.cached_tokens < kind.prompt_tokens).all()
    plain = kinds_of(dataclasses.replace(scenario, prefix_cache=False), 0)[0]
    assert not plain.cached_tokens.any()
    np.testing.assert_array_equal(plain.prompt_tokens, kind.prompt_tokens)


def test_a_mooncake_trace_reuses_the_blocks_that_its_hashes_name(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {
            "timestamp": 100 * i,
            "input_length": 2000,
            "output_length": 20,
            "hash_ids": [0, 1, 10 + (i % 2), 100 + i],
        }
        for i in range(40)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    scenario = dataclasses.replace(
        load_scenario("chat_low").shortened(100),
        warm_up_steps=0,
        lengths={"trace": str(path)},
        prefix_cache=True,
    )
    _, warm = metered(scenario, seed=0)
    _, cold = metered(dataclasses.replace(scenario, prefix_cache=False), seed=0)
    # 1,536 of 2,000 tokens are known, once both branches were seen.
    assert cold % 2000 == 0
    requests = cold // 2000
    assert warm <= 4 * 2000 + 464 * requests
    assert warm >= 464 * (requests - 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINE.replace("0.75", "1.5"), "shared_prefix needs a share"),
        (MINE.replace("tokens = 1024", "tokens = 0"), "shared_prefix needs a share"),
        (MINE.replace("share = 0.75, ", ""), "shared_prefix needs a share"),
        (MINE + '[lengths]\ntrace = "azure_code"\n', "its own prefixes"),
    ],
)
def test_impossible_prefixes_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_scenario(str(path))
