"""Our engine and its settings in `parlay bench engine`, the rounds, and what a step costs."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from tests.tiny import tiny_backend

from parlay.engine.bench import Timing
from parlay.engine.bench_lane import PARLAY, choose, lane
from parlay.engine.bench_load import Answer, Decode, Entrant, Load, mixed_loads, row_of
from parlay.engine.bench_overhead import overhead_ms
from parlay.engine.bench_rounds import run_rounds
from parlay.engine.demo.prompts import demo_prompts

LOADS = [Load(c, [[1, 2, 3]] * c, [5] * c, ["chat"] * c) for c in (1, 4)]


def at_speed(tokens_per_s: dict[int, float]) -> Decode:
    def decode(load: Load) -> Answer:
        seconds = load.tokens / tokens_per_s[load.concurrency]
        return Answer(seconds, [Timing(0.1, seconds, n) for n in load.lengths])

    return decode


@pytest.mark.parametrize("policy", ["none", "goodput"])
def test_our_engine_decodes_a_load_and_keeps_so_many_at_once(policy: str) -> None:
    backend = tiny_backend()
    rows: list[int] = []
    verify = backend.verify

    def watched(batch, drafts, verify_k):  # type: ignore[no-untyped-def]
        rows.append(len(batch.requests))
        return verify(batch, drafts, verify_k)

    backend.verify = watched  # type: ignore[method-assign]
    load = Load(2, [[1, 2, 3], [2, 3], [3, 1], [1]], [9, 4, 6, 1], ["chat"] * 4)
    answer = lane(backend, (), policy, {})(load)
    assert [t.tokens for t in answer.timings] == load.lengths
    assert max(rows) == 2
    for timing in answer.timings:
        assert 0 < timing.ttft_s <= timing.total_s <= answer.seconds
    assert answer.timings[3].ttft_s == answer.timings[3].total_s
    assert answer.tokens_per_s == pytest.approx(20 / answer.seconds)


def test_the_fastest_setting_is_chosen_for_each_concurrency() -> None:
    lanes = [("a", at_speed({1: 9.0, 4: 20.0})), ("b", at_speed({1: 8.0, 4: 30.0}))]
    done: list[Load] = []
    chosen = choose(lanes, "gate", LOADS, done.append)
    assert (chosen.engine, chosen.mode, chosen.settings) == (PARLAY, "gate", {1: "a", 4: "b"})
    assert [chosen.decode(load).tokens_per_s for load in LOADS] == pytest.approx([9, 30])
    assert len(done) == 4


def test_every_entrant_is_first_in_its_turn() -> None:
    order: list[str] = []

    def entrant(name: str, *concurrencies: int) -> Entrant:
        def decode(load: Load) -> Answer:
            order.append(f"{name}{load.concurrency}")
            return Answer(1.0, [])

        return Entrant(name, "none", dict.fromkeys(concurrencies, ""), decode)

    entrants = [entrant("a", 1, 4), entrant("b", 1), entrant("c", 1, 4)]
    answers = run_rounds(entrants, LOADS, 2, math.inf, lambda _: None, lambda _: None)
    assert order == ["a1", "b1", "c1", "c4", "a4", "b1", "c1", "a1", "a4", "c4"]
    assert {key: len(a) for key, a in answers.items()} == {
        (0, 1): 2, (1, 1): 2, (2, 1): 2, (0, 4): 2, (2, 4): 2,
    }  # fmt: skip


def test_no_round_but_the_first_begins_too_late() -> None:
    entrant = Entrant("a", "none", {1: ""}, lambda _: Answer(1.0, []))
    now_s = time.monotonic()
    for stop_s, rounds in ((now_s - 1, 1), (now_s + 60, 3)):
        answers = run_rounds([entrant], LOADS[:1], 3, stop_s, lambda _: None, lambda _: None)
        assert len(answers[0, 1]) == rounds


def test_loads_are_the_demos_mixed_cells() -> None:
    prompts = demo_prompts()
    loads = mixed_loads(prompts, [[i] for i in range(len(prompts))], 20, {1: 6, 4: 8, 16: 30})
    assert [(load.concurrency, len(load.prompts)) for load in loads] == [(1, 6), (4, 8), (16, 30)]
    assert len(set(loads[0].tasks)) == 6
    for load in loads:
        assert load.tasks == [prompts[ids[0]].task for ids in load.prompts]
    assert len(set(loads[2].lengths)) > 1


def test_a_row_pools_rounds() -> None:
    entrant = Entrant("vllm", "ngram", {4: "k"}, at_speed({}))
    answers = [
        Answer(2.0, [Timing(0.1, 1.1, 11), Timing(0.3, 0.3, 1)], 5.0),
        Answer(1.0, [Timing(0.2, 0.4, 3)], None),
    ]
    assert row_of(entrant, 4, answers) == {
        "engine": "vllm",
        "mode": "ngram",
        "concurrency": 4,
        "setting": "k",
        "tokens_per_s": pytest.approx(5.0),
        "tokens_per_s_by_round": pytest.approx([6.0, 3.0]),
        "ttft_ms": pytest.approx(200),
        "tpot_ms": pytest.approx(100),
        "peak_memory_mb": 5.0,
    }
    lone = row_of(entrant, 4, [Answer(1.0, [Timing(0.2, 0.2, 1)])])
    assert lone["tpot_ms"] is None
    assert lone["peak_memory_mb"] is None


def test_overhead_is_what_is_neither_verified_nor_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny_backend()
    found = overhead_ms(backend, [[1, 2, 3], [2, 3, 4]], {"none": "none", "a": "goodput"}, steps=3)
    assert {mode: list(by) for mode, by in found.items()} == {
        "none": ["4", "32"],
        "a": ["4", "32"],
    }
    assert all(0 < ms < 1000 for by in found.values() for of in by.values() for ms in of.values())
    assert found["a"]["4"]["policy"] > found["none"]["4"]["policy"]
    verify = backend.verify

    def slow(*args: Any) -> Any:
        time.sleep(0.05)  # outside what verify says of itself
        return verify(*args)

    monkeypatch.setattr(backend, "verify", slow)
    late = overhead_ms(backend, [[1, 2, 3]], {"none": "none"}, steps=3)
    assert late["none"]["4"]["engine"] > 50

    def slow_pass(*args: Any) -> Any:
        verified = slow(*args)
        verified.verify_ms += 50
        return verified

    monkeypatch.setattr(backend, "verify", slow_pass)
    found = overhead_ms(backend, [[1, 2, 3]], {"none": "none"}, steps=3)
    assert found["none"]["4"]["engine"] < late["none"]["4"]["engine"] - 30


def test_learning_counts_as_the_policys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any) -> None:
        time.sleep(0.05)

    monkeypatch.setattr("parlay.policies.goodput.Goodput.observe", slow)
    found = overhead_ms(tiny_backend(), [[1, 2, 3]], {"a": "goodput"}, steps=3)
    assert found["a"]["4"]["policy"] > 50
    assert found["a"]["4"]["engine"] < 40
