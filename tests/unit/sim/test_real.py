import dataclasses
import time

import numpy as np
import pytest

from parlay.engine.step import EngineConfig
from parlay.policies.baselines.rows import batch_plan
from parlay.policies.policy import EngineLimits, Stateless, make_policy
from parlay.policies.types import DRAFT_MODEL, NGRAM, BatchView, Plan, Proposer
from parlay.sim.costs import Work, load_costs
from parlay.sim.counterfactual import TracedRequest
from parlay.sim.real import (
    Ask,
    Compared,
    Player,
    agreement,
    learn_costs,
    simulated,
    timed,
    waves,
)

LIMITS = EngineLimits(0b111, 8, (), 512)
CONFIG = EngineConfig(context_tokens=4096)
COSTS = load_costs("cpu_smollm")


def recorded(count: int, outputs: int = 60) -> list[TracedRequest]:
    found = []
    for number in range(count):
        rng = np.random.default_rng(number)
        drafted = np.where(rng.random(outputs) < 0.4, 8, 0)
        held = np.minimum(rng.geometric(0.4, outputs) - 1, drafted)
        model = np.minimum(rng.geometric(0.35, outputs) - 1, 8)
        found.append(
            TracedRequest(
                f"r{number}",
                "chat",
                40,
                {NGRAM: 8, DRAFT_MODEL: 8},
                {NGRAM: drafted, DRAFT_MODEL: np.full(outputs, 8)},
                {NGRAM: held, DRAFT_MODEL: model},
                np.where(drafted > 0, 4, 0),
            )
        )
    return found


def asks_of(requests: list[TracedRequest]) -> list[Ask]:
    return [Ask(range(r.prompt_tokens), r.task, r.output_tokens) for r in requests]


def test_costs_learned_from_one_run_foretell_others() -> None:
    # The simulator on other costs stands for the engine here.
    requests = recorded(16)
    parts = waves(asks_of(requests), 4)
    costs = learn_costs(simulated(COSTS, requests, LIMITS), CONFIG, parts)
    rows = []
    for name, settings in (
        ("none", {}),
        ("fixed", {"proposer": "draft_model", "k": "1"}),
        ("fixed", {"proposer": "draft_model", "k": "7"}),
        ("fixed", {"proposer": "ngram", "k": "4"}),
        ("goodput", {}),
    ):
        speeds = []
        for model in (costs, COSTS):
            player = Player(
                simulated(model, requests, LIMITS),
                lambda limits, n=name, s=settings: make_policy(n, s, limits),  # type: ignore[misc]
                CONFIG,
            )
            speeds.append([player.play(part) for part in parts])
        rows.append(Compared(name, *speeds))
    found = agreement(rows)
    assert max(abs(error) for error in found.errors) < 0.1
    assert found.tau >= 0.8
    assert max(found.measured) > 1.2


def test_learned_costs_price_drafts_and_rows() -> None:
    requests = recorded(8)
    costs = learn_costs(simulated(COSTS, requests, LIMITS), CONFIG, waves(asks_of(requests), 4))
    for work in (Work(4, 4, 300), Work(20, 4, 300), Work(4, 4, 300, (4, 4, 4), 300)):
        assert costs.time(work).step_ms == pytest.approx(COSTS.time(work).step_ms, rel=0.15)


def test_gains_are_of_the_same_wave() -> None:
    slow_machine = np.array([1.0, 0.5, 0.1])
    rows = [
        Compared("none", [10.0] * 3, (100 * slow_machine).tolist()),
        Compared("a", [15.0] * 3, (150 * slow_machine).tolist()),
        Compared("b", [5.0] * 3, (60 * slow_machine).tolist()),
    ]
    found = agreement(rows)
    assert found.errors == pytest.approx([0.0, 0.5 / 0.6 - 1.0])
    assert found.tau == pytest.approx(1.0)
    assert found.repeat_tau is None
    swapped = [dataclasses.replace(rows[0]), rows[2], rows[1]]
    assert agreement(swapped).measured == pytest.approx([0.6, 1.5])


def test_rounds_of_measuring_are_compared_with_each_other() -> None:
    rows = [
        Compared("none", [1.0] * 4, [10.0, 10.0, 20.0, 20.0]),
        Compared("a", [1.0] * 4, [12.0, 12.0, 30.0, 30.0]),
        Compared("b", [1.0] * 4, [13.0, 13.0, 28.0, 28.0]),
    ]
    found = agreement(rows, rounds=2)
    assert found.repeat_tau == pytest.approx(1 / 3)
    assert found.repeat_error == pytest.approx(0.2)  # 1.2 against 1.5


def test_waves_are_full() -> None:
    asks = asks_of(recorded(5))
    assert [len(part) for part in waves(asks, 2)] == [2, 2]


class Slow(Stateless):
    """Decides nothing, in 3 ms of its thread's time."""

    name = "slow"

    def decide(self, view: BatchView) -> Plan:
        end_s = time.thread_time() + 0.003
        while time.thread_time() < end_s:
            pass
        return batch_plan(view, Proposer.NONE, 0)


def test_a_policy_takes_its_time_in_the_simulator_too() -> None:
    requests = recorded(4)
    like = simulated(COSTS, requests, LIMITS)
    seen: list[float] = []
    player = Player(
        like, timed(lambda _: Slow(), like), CONFIG, lambda _, o: seen.append(o.step_ms)
    )
    player.play(asks_of(requests))
    without: list[float] = []
    Player(like, lambda _: Slow(), CONFIG, lambda _, o: without.append(o.step_ms)).play(
        asks_of(requests)
    )
    assert np.median(np.array(seen) - without) == pytest.approx(3.0, abs=0.5)
