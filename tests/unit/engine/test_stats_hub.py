"""What the hub keeps of an engine's steps and requests, without a wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from parlay.engine import stats_hub
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote_stats import RemoteStats
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.stats_hub import StatsHub, TooMany
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, StepCost, Task, VirtualBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import Proposer, task_id

HALF = Task({Proposer.NGRAM: (0.6,), Proposer.DRAFT_MODEL: (0.5,)})
SPEAK = SpeculationParams(task="t")


def make(**sizes: Any) -> Engine:
    backend = VirtualBackend(Hazards({"t": HALF}), StepCost(fixed_ms=10.0, token_ms=0.0))
    policy = make_policy("fixed", {"proposer": "ngram", "k": 3}, backend.limits())
    return Engine(backend, LocalPlanner(policy), EngineConfig(**sizes))


def watched(engine: Engine) -> StatsHub:
    hub = StatsHub("engine")
    hub.attach(engine)
    return hub


def ask(engine: Engine, tokens: int = 20, prompt: int = 3) -> Request:
    return engine.add(list(range(prompt)), SamplingParams(max_tokens=tokens), SPEAK)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_an_engine_that_nobody_watches_does_as_one_that_is_watched() -> None:
    alone, seen = make(), make()
    watched(seen)
    texts = [[ask(engine) for _ in range(3)] for engine in (alone, seen)]
    run(alone)
    run(seen)
    assert alone.stats is None
    assert [r.output for r in texts[0]] == [r.output for r in texts[1]]


def test_counters_are_the_sums_over_every_step() -> None:
    engine = make()
    hub = watched(engine)
    requests = [ask(engine) for _ in range(3)]
    outcomes = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        outcomes.append(outcome)
    hub.absorb()
    counters = hub.counters
    assert counters.steps == len(outcomes)
    assert counters.emitted_tokens == sum(r.output_tokens for r in requests) == 60
    assert counters.drafted_tokens == sum(int(o.drafted_k.sum()) for o in outcomes) > 0
    assert counters.accepted_tokens == sum(int(o.accepted.sum()) for o in outcomes) > 0
    assert counters.finished_requests == 3
    assert (counters.plans_local, counters.plans_remote) == (len(outcomes), 0)


def test_a_request_s_figures_agree_with_the_request() -> None:
    engine = make()
    hub = watched(engine)
    engine.backend.time_s = 5.0  # type: ignore[attr-defined]
    request = ask(engine)
    run(engine)
    stats = hub.request(request.request_id)
    assert stats is not None
    assert (stats.task, stats.prompt_tokens, stats.output_tokens) == (task_id("t"), 3, 20)
    assert (stats.steps, stats.finished, stats.preemptions) == (request.steps, True, 0)
    steps, drafted, verified, accepted = stats.proposers[Proposer.NGRAM]
    assert (drafted, accepted) == (request.drafted, request.accepted)
    assert accepted < verified <= drafted <= 3 * steps
    assert stats.ttft_ms == pytest.approx(10.0)
    took_ms = 1e3 * (engine.backend.clock() - 5.0)
    assert stats.tpot_ms == pytest.approx((took_ms - 10.0) / 19)


def test_a_request_that_waits_has_figures_but_no_times() -> None:
    engine = make(max_running=1)
    hub = watched(engine)
    ask(engine)
    waits = ask(engine)
    engine.step()
    stats = hub.request(waits.request_id)
    assert stats is not None
    assert (stats.output_tokens, stats.ttft_ms, stats.tpot_ms) == (0, None, None)
    assert not stats.finished


def test_preemptions_are_counted_by_request_and_in_all() -> None:
    engine = make(target_blocks=6, block_tokens=4)
    hub = watched(engine)
    requests = [ask(engine, tokens=16) for _ in range(3)]
    run(engine)
    hub.absorb()
    every = [hub.request(r.request_id) for r in requests]
    assert sum(r.preemptions for r in requests) > 0
    assert [s.preemptions for s in every if s is not None] == [r.preemptions for r in requests]
    assert hub.counters.preemptions == sum(r.preemptions for r in requests)


def test_a_request_that_is_aborted_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(max_running=1)
    hub = watched(engine)
    runs, waits = ask(engine), ask(engine)
    engine.step()
    engine.abort(runs)
    engine.abort(waits)
    monkeypatch.setattr(stats_hub, "SWEEP_S", -1.0)
    hub.absorb()
    assert hub.counters.finished_requests == 2
    stats = hub.request(waits.request_id)
    assert stats is not None
    assert stats.finished


def test_only_the_newest_that_ended_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_hub, "REMEMBERED_REQUESTS", 4)
    engine = make()
    hub = watched(engine)
    requests = [ask(engine, tokens=1 + i) for i in range(10)]
    run(engine)
    known = [r for r in requests if hub.request(r.request_id) is not None]
    assert len(known) == 4
    assert requests[-1] in known
    assert hub.counters.finished_requests == 10
    assert hub.request(99) is None


def test_a_full_queue_loses_its_oldest_and_counts_them() -> None:
    engine = make()
    hub = watched(engine)
    ask(engine, tokens=400)
    with hub.subscribe() as subscription:
        run(engine)
        hub.absorb()
        hub.end()
        last = engine.step_id - 1
        seen = asyncio.run(drain(subscription))
    assert seen == list(range(last - stats_hub.QUEUE_STEPS + 1, last + 1))
    assert subscription.lost_steps == last + 1 - stats_hub.QUEUE_STEPS > 0
    assert hub.subscribers == 0


def test_a_backlog_that_is_not_absorbed_loses_its_oldest_and_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats_hub, "BACKLOG_STEPS", 100)
    engine = make()
    hub = watched(engine)
    ask(engine, tokens=500)
    with hub.subscribe() as subscription:
        engine.step()
        hub.absorb()
        run(engine)
        hub.absorb()
    lost = engine.step_id - stats_hub.BACKLOG_STEPS - 1
    assert lost > 0
    assert hub.counters.steps == engine.step_id
    assert subscription.lost_steps == engine.step_id - stats_hub.QUEUE_STEPS


async def drain(subscription: stats_hub.Subscription) -> list[int]:
    seen = []
    while (step := await subscription.next()) is not None:
        seen.append(step.outcome.step_id)
    return seen


def test_who_samples_gets_the_newest_step_and_loses_nothing() -> None:
    engine = make()
    hub = watched(engine)
    ask(engine)
    with hub.subscribe(newest_only=True) as subscription:
        run(engine)
        hub.absorb()
        hub.end()
        assert asyncio.run(drain(subscription)) == [engine.step_id - 1]
    assert subscription.lost_steps == 0


def test_who_comes_late_gets_the_newest_step_first() -> None:
    engine = make()
    hub = watched(engine)
    ask(engine)
    run(engine)
    with hub.subscribe() as subscription:
        hub.end()
        assert asyncio.run(drain(subscription)) == [engine.step_id - 1]


def test_places_for_subscribers_are_limited_and_come_back() -> None:
    hub = StatsHub("engine")
    with hub.subscribe():
        places = [hub.subscribe() for _ in range(stats_hub.MAX_SUBSCRIBERS - 1)]
        for place in places:
            place.__enter__()
        with pytest.raises(TooMany, match="32 callers watch"), hub.subscribe():
            pass
        for place in places:
            place.__exit__(None, None, None)
        with hub.subscribe():
            assert hub.subscribers == 2
    assert hub.subscribers == 0


def test_what_the_sidecar_s_planner_counts_is_passed_on() -> None:
    engine = make()
    engine.planner.stats = RemoteStats(late_steps=3, dropped_reports=2)  # type: ignore[attr-defined]
    hub = watched(engine)
    ask(engine)
    engine.step()
    hub.absorb()
    assert (hub.counters.late_steps, hub.counters.dropped_reports) == (3, 2)
