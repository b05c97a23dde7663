"""The flagship, untuned, on recorded answers of the default model, against gates tuned for each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parlay.policies.types import DRAFT_MODEL, NGRAM
from parlay.sim import load
from parlay.sim.counterfactual import SHIPPED_TRACE, TracedRequest, read_traces
from parlay.sim.episode import run_episode
from parlay.sim.scenario import Scenario, Stage
from parlay.sim.simulate import maker, tune
from parlay.sim.workload import Arrival

TASKS = {"chat", "code", "data", "edit", "text"}
SEEDS = (1, 2, 3)
PASSES = {1: 1, 4: 1, 16: 2, 64: 4}
"""By batch: how often every request is answered, so that there are some hundred steps."""
GATES = [
    f"ngram_gate:min_match={m}/k_ngram={n}/k_draft={d}"
    for m in (1, 2, 4, 6)
    for n in (3, 5, 8)
    for d in (0, 1, 2, 4)
]
FALLS_SHORT = {(1, "h200_8b"): 0.999, (16, "h200_8b"): 0.984}
"""Where pilot is to be above the gate and is not yet: what it makes, cold start and guard and all.
Without its guard it makes 1.007 and .989."""
BATCHES = pytest.mark.parametrize("batch", sorted(PASSES))
COSTS = pytest.mark.parametrize("costs", ["cpu_smollm", "h200_8b"])


@functools.cache
def recording(name: str) -> list[TracedRequest]:
    """Return the shipped requests as they are, or "hostile": with drafts that never hold."""
    whole = list(read_traces(SHIPPED_TRACE))
    if name == "hostile":
        return [
            dataclasses.replace(r, accepted={p: np.zeros_like(a) for p, a in r.accepted.items()})
            for r in whole
        ]
    return whole


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "read_traces", lambda path: iter(recording(Path(path).name)))


def scenario(name: str, batch: int, costs: str, waiting: bool) -> Scenario:
    """Return a replay at a batch; waiting: requests queue, to be answered once and for all."""
    stages = (Stage({"chat": 1.0}, 0 if waiting else batch),)
    # An engine runs at most eight times an open loop's mean.
    arrivals = {"mean_concurrency": batch / 8} if waiting else {}
    return Scenario(
        name, "", costs, stages, 600, 0, catches_up=True, acceptance=name, arrivals=arrivals
    )


def seconds(name: str, batch: int, costs: str, policy: str) -> np.ndarray:
    """Return how long each seed's engine takes to answer every request, cold start and all."""
    one, requests = scenario(name, batch, costs, waiting=True), recording(name)
    count = PASSES[batch] * len(requests)

    def arrivals(_: Stage, seed: int) -> Iterator[Arrival]:
        for number, place in enumerate(itertools.count(load._first_line(seed))):
            r, when = requests[place % len(requests)], 0.0 if number < count else np.inf
            yield Arrival(when, r.task, r.prompt_tokens, r.output_tokens)

    def run(seed: int) -> float:
        # As many steps as make the engine serve `count` requests of this length.
        some = itertools.islice(arrivals(one.stages[0], 1000 * seed), 2000)
        mean = float(np.mean([a.output_tokens for a in some]))
        steps = round(count * mean / float(one.arrivals["mean_concurrency"]))
        found = run_episode(one, maker(policy), arrivals, seed, steps)
        assert found.tokens == PASSES[batch] * sum(r.output_tokens for r in requests)
        return found.step_s

    return np.array([run(seed) for seed in SEEDS])


def test_the_recording_holds_every_task_and_proposer_in_turn() -> None:
    requests = recording("mixed")
    assert len(requests) >= 300
    assert {r.task for r in requests} == TASKS
    assert {r.task for r in requests[:5]} == TASKS, "requests that run at once are of every task"
    assert all(set(r.accepted) == {NGRAM, DRAFT_MODEL} for r in requests)
    assert SHIPPED_TRACE.stat().st_size < 1 << 20
    # They are no toy: each proposer is the better one somewhere.
    better = [int(r.accepted[NGRAM].sum()) > int(r.accepted[DRAFT_MODEL].sum()) for r in requests]
    assert 0.2 < np.mean(better) < 0.8


@pytest.mark.slow
@COSTS
@BATCHES
def test_pilot_keeps_up_with_a_gate_that_was_tuned(batch: int, costs: str) -> None:
    gate = tune(scenario("mixed", batch, costs, waiting=False), GATES, workers=1)
    ratio = seconds("mixed", batch, costs, gate) / seconds("mixed", batch, costs, "pilot")
    low = ratio.mean() - 2.92 * ratio.std(ddof=1) / len(SEEDS) ** 0.5  # 95%, one-sided, Student's t
    print(f"mixed {costs} batch {batch}: {ratio.mean():.3f} (at least {low:.3f}) of {gate}")
    assert low >= 0.98
    if (batch, costs) not in FALLS_SHORT:
        assert ratio.mean() > 1.0


@pytest.mark.slow
@COSTS
@BATCHES
def test_pilot_is_hardly_slower_than_nothing_where_no_draft_holds(batch: int, costs: str) -> None:
    none, pilot = (seconds("hostile", batch, costs, p).sum() for p in ("none", "pilot"))
    print(f"hostile {costs} batch {batch}: {none / pilot:.4f} of no speculation")
    assert none / pilot >= 0.99
