"""The fast loop with keyed luck: its episodes are the engine's to the last digit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlay.policies.policy import Policy, registry
from parlay.policies.types import Array, BatchView, Plan, StepOutcome
from parlay.sim.costs import TableCosts, load_costs
from parlay.sim.episode import MakePolicy, run_episode
from parlay.sim.fast import FastLoop
from parlay.sim.feed import Feed
from parlay.sim.keyed import fits, run_side_by_side
from parlay.sim.keyed_luck import KeyedLuck
from parlay.sim.kinds import Kind
from parlay.sim.load import arrivals_of
from parlay.sim.scenario import Scenario, Stage, load_scenario, scenario_names
from parlay.sim.simulate import maker
from parlay.sim.tally import Episode

FEW = ["goodput", "hf_confidence", "survival_budget", "filtering_oracle"]
"""Between them: survivals and shadows, a stop rule, a budget on confidences, and the latents."""


def short(name: str, steps: int = 30, **change: Any) -> Scenario:
    scenario = load_scenario(name)
    if scenario.arrivals:
        change["arrivals"] = {**scenario.arrivals, "rate_scale": 2.0}
    change = {"warm_up_steps": 6, "runs": min(scenario.runs, 2), **change}
    return dataclasses.replace(scenario.shortened(steps), **change)


class Spy:
    """Plays a policy and keeps what it was shown and told."""

    def __init__(self, inner: Policy, into: list[Any]) -> None:
        self.inner, self.into, self.name = inner, into, inner.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decide(self, view: BatchView) -> Plan:
        self.into.append(view)
        return self.inner.decide(view)

    def observe(self, outcome: StepOutcome) -> None:
        self.into.append(outcome)
        self.inner.observe(outcome)


def spied(policy: str, into: list[Any]) -> MakePolicy:
    make = maker(policy)
    return lambda limits, backend: Spy(make(limits, backend), into)


def as_dict(thing: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if dataclasses.is_dataclass(value):
            out |= {f"{field.name}.{k}": v for k, v in as_dict(value).items()}
        else:
            out[field.name] = value
    return out


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    a, b = as_dict(ours), as_dict(theirs)
    for key, value in a.items():
        np.testing.assert_array_equal(value, b[key], err_msg=f"{where} {key}")
        if isinstance(b[key], np.ndarray):
            assert value.dtype == b[key].dtype, f"{where} {key}"


def check(scenario: Scenario, policies: list[str], seed: int = 3) -> list[Episode]:
    arrivals = arrivals_of(scenario)
    seen: list[list[Any]] = [[] for _ in policies]
    fast = run_side_by_side(
        scenario,
        [spied(p, into) for p, into in zip(policies, seen, strict=True)],
        arrivals,
        [seed] * len(policies),
    )
    for policy, found, one in zip(policies, fast, seen, strict=True):
        told: list[Any] = []
        episode = run_episode(scenario, spied(policy, told), arrivals, seed)
        if scenario.runs == 1:
            assert len(one) == len(told) > 40
            for step, (ours, theirs) in enumerate(zip(one, told, strict=True)):
                assert_same(ours, theirs, f"{policy} {step // 2}")
            assert_same(found, episode, policy)
        assert found.tokens == episode.tokens > 0
        assert found.step_s == pytest.approx(episode.step_s, rel=1e-12)
        assert found.tpot_ms == pytest.approx(episode.tpot_ms, rel=1e-12)
    return fast


@pytest.mark.parametrize("policy", FEW)
def test_an_episode_is_the_engines(policy: str) -> None:
    check(short("mixed"), [policy])


@pytest.mark.slow
def test_it_is_for_every_policy_there_is() -> None:
    check(short("mixed", 60), sorted(registry()))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(n for n in scenario_names() if fits(load_scenario(n))))
def test_it_is_in_every_scenario_that_fits(name: str) -> None:
    check(short(name, 60), FEW)


def test_a_draft_model_that_must_catch_up_does_so_in_both() -> None:
    lazy = "batch_table"
    scenario = short("small_gpu", 40, kv_requests=0)
    assert scenario.catches_up
    check(scenario, ["ngram_gate:min_match=4/k_ngram=5/k_draft=3", lazy])


def test_policies_do_not_see_one_another() -> None:
    scenario = short("chat_low", 60)
    alone = check(scenario, ["goodput"])[0]
    together = check(scenario, ["none", "goodput", "ucb_spec"])
    assert_same(together[1], alone)


def test_a_trace_that_ends_ends_the_episode(tmp_path: Path) -> None:
    rows = [f"{0.01 * i},{40 + i},{20 + i}" for i in range(12)]
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    scenario = short("chat_low", 500, lengths={"trace": str(path)})
    episode = check(scenario, ["none"], seed=0)[0]
    assert len(episode.ttft_s) == 12
    late = dataclasses.replace(scenario, warm_up_steps=10_000)
    for run in (
        lambda: run_side_by_side(late, [maker("none")], arrivals_of(late), [0]),
        lambda: run_episode(late, maker("none"), arrivals_of(late), 0),
    ):
        with pytest.raises(ValueError, match="the trace ended within the 10000 steps of warm-up"):
            run()


def test_what_needs_the_engines_blocks_is_left_to_it() -> None:
    for change in ({"kv_requests": 40}, {"prefix_cache": True}):
        scenario = dataclasses.replace(load_scenario("mixed"), **change)
        assert not fits(scenario)
        with pytest.raises(ValueError, match="use run_episode"):
            run_side_by_side(scenario, [maker("none")], arrivals_of(scenario), [1])


def test_the_training_step_makes_the_engines_episode_of_the_same_decisions() -> None:
    """`FastLoop.step`, which environments call; linucb leaves no draft to a stop rule."""
    scenario = dataclasses.replace(short("mixed", 60), warm_up_steps=0)
    told: list[Any] = []
    run_episode(scenario, spied("linucb", told), arrivals_of(scenario), 3)
    outcomes = [one for one in told if isinstance(one, StepOutcome)]
    loop, luck = keyed_loop(scenario, 3000)
    for step, outcome in enumerate(outcomes):
        if step == 0:
            loop.turn()
        chosen = by_row(luck, outcome, {"who": outcome.proposer, "k": outcome.drafted_k})
        before = luck.number.copy()
        done = loop.step(chosen["who"], chosen["k"])
        emitted = dict(zip(before.tolist(), done.emitted.tolist(), strict=True))
        for key, n in zip(outcome.request_id.tolist(), outcome.emitted.tolist(), strict=True):
            assert emitted[key] == n
        # Behind the engine a proposer's time is told in single precision.
        assert done.step_ms[0] == pytest.approx(outcome.step_ms, rel=1e-6)


def keyed_loop(scenario: Scenario, seed: int) -> tuple[FastLoop, KeyedLuck]:
    costs = load_costs(scenario.costs)
    assert isinstance(costs, TableCosts)
    from parlay.sim.episode import set_up

    backend, _ = set_up(scenario, maker("none"), seed, costs)
    none = np.zeros(0, np.int64)
    rows = scenario.most_running
    kind = Kind(costs, rows, scenario.tasks, none, none, none, none, scenario.catches_up)
    luck = KeyedLuck([backend], rows)
    loop = FastLoop([kind], 0, luck=luck)
    feed = Feed(scenario, arrivals_of(scenario), seed)
    # A closed loop's requests come in one order, whenever they come.
    crowd = dataclasses.replace(scenario, stages=(Stage(scenario.stages[0].mix, 400),))
    for arrival, _ in Feed(crowd, feed.arrivals, seed).due(0, 0.0, 0)[0]:
        luck.arrive(0, arrival)
    return loop, luck


def by_row(luck: KeyedLuck, outcome: StepOutcome, of: Mapping[str, Array]) -> dict[str, Array]:
    out = {name: np.zeros(len(luck.number), np.int64) for name in of}
    place = {key: row for row, key in enumerate(luck.number.tolist())}
    for i, key in enumerate(outcome.request_id.tolist()):
        for name, values in of.items():
            out[name][place[key]] = values[i]
    return out
