"""The figures that page, terminal and JSON share, against the steps they are made from."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from tests.watching import TAGS, Clock, run_steps

from parlay.controller.figures import figures
from parlay.controller.host import Host
from parlay.controller.observatory import PROBE, Observatory, Unknown
from parlay.controller.overview import SILENT_S, overview, task_name
from parlay.controller.wording import gain, number, plain, share
from parlay.policies.explain import BY_GUARD, NOTHING_LEFT
from parlay.policies.types import task_id


def watched(policy: str = "goodput") -> tuple[Host, Observatory, Clock]:
    clock = Clock()
    observatory = Observatory(clock)
    return Host(policy, watch=observatory), observatory, clock


def test_an_engines_figures_are_those_of_its_steps() -> None:
    host, observatory, clock = watched()
    _, seen = run_steps(host, "e", 50, clock=clock)
    found = overview(observatory)
    (engine,), totals = found["engines"], found["totals"]
    emitted = sum(int(o.emitted.sum()) for _, _, o in seen)
    step_ms = sum(float(o.step_ms) for _, _, o in seen)
    drafting = sum(int(((o.emitted > 0) & (o.proposer > 0)).sum()) for _, _, o in seen)
    rows = sum(int((o.emitted > 0).sum()) for _, _, o in seen)
    assert engine["tokens_per_s"] == pytest.approx(1e3 * emitted / step_ms, rel=1e-5)
    assert engine["step_ms"] == pytest.approx(step_ms / len(seen), rel=1e-5)
    assert totals["tokens_per_row"] == pytest.approx(emitted / rows, rel=1e-5)
    assert totals["drafting_share"] == pytest.approx(drafting / rows, rel=1e-5)
    assert totals["fallback_share"] == 0.0
    assert engine["steps"] == engine["decisions"] == len(seen)
    assert {task["task"] for task in found["tasks"]} <= set(TAGS)
    assert sum(engine["shares"].values()) == pytest.approx(1.0, abs=1e-5)
    view, plan, _ = seen[-1]
    newest = {row["request_id"]: row for row in found["decisions"]}
    assert set(newest) == set(view.request_id.tolist())
    assert all(newest[r]["k"] == k for r, k in zip(plan.request_id.tolist(), plan.k, strict=True))


def test_a_step_that_the_guard_took_is_said_to_be_the_guards() -> None:
    host, observatory, clock = watched("pilot")
    session, seen = run_steps(host, "e", 60, clock=clock)
    assert BY_GUARD not in {row["why"] for row in overview(observatory)["decisions"]}
    view, plan, _ = seen[-1]
    plan = copy.copy(plan)
    plan.survival, plan.k = None, np.zeros_like(plan.k)
    observatory.decided(session, view, plan)
    assert {row["why"] for row in overview(observatory)["decisions"]} == {BY_GUARD}
    host, observatory, clock = watched("fixed")
    run_steps(host, "e", 3, clock=clock)
    assert BY_GUARD not in {row["why"] for row in overview(observatory)["decisions"]}


def test_a_request_with_nothing_left_to_draft_is_not_said_to_lose_by_it() -> None:
    host, observatory, clock = watched()
    session, seen = run_steps(host, "e", 20, clock=clock)
    view, plan, _ = seen[-1]
    view, plan = copy.copy(view), copy.copy(plan)
    view.max_k, plan.k = np.zeros_like(view.max_k), np.zeros_like(plan.k)
    observatory.decided(session, view, plan)
    assert {row["why"] for row in overview(observatory)["decisions"]} == {NOTHING_LEFT}


def test_an_engine_that_has_left_counts_in_no_sum_until_it_is_back() -> None:
    host, observatory, clock = watched()
    session, _ = run_steps(host, "one", 20, clock=clock)
    run_steps(host, "two", 20, clock=clock)
    assert overview(observatory)["totals"]["engines"] == 2
    host.leave(session, session.stream)
    found = overview(observatory)
    assert found["totals"]["engines"] == 1
    assert [row["ended"] for row in found["engines"]] == [True, False]
    assert {row["engine"] for row in found["decisions"]} == {"two"}
    run_steps(host, "one", 1, clock=clock)
    assert overview(observatory)["totals"]["engines"] == 2


def test_who_only_asks_whether_there_are_plans_is_no_engine() -> None:
    host, observatory, clock = watched()
    run_steps(host, PROBE, 3, clock=clock)
    assert overview(observatory)["engines"] == []
    run_steps(host, "e", 3, clock=clock)
    assert [row["engine"] for row in overview(observatory)["engines"]] == ["e"]


def test_totals_are_sums_over_engines_that_are_heard() -> None:
    host, observatory, clock = watched()
    run_steps(host, "one", 20, rows=4, clock=clock)
    run_steps(host, "two", 20, rows=6, clock=clock)
    both = overview(observatory)
    rates = [engine["tokens_per_s"] for engine in both["engines"]]
    assert both["totals"]["tokens_per_s"] == pytest.approx(sum(rates), rel=1e-5)
    assert both["totals"]["running"] == sum(engine["running"] for engine in both["engines"])
    clock.now_s += SILENT_S + 1.0
    run_steps(host, "two", 1, rows=6, clock=clock)
    later = overview(observatory)
    assert later["totals"]["engines"] == 1
    assert len(later["engines"]) == 2
    assert {row["engine"] for row in later["decisions"]} == {"two"}
    assert overview(observatory, "one")["totals"]["engines"] == 0
    with pytest.raises(Unknown, match="no engine 'three' was heard; known: one, two"):
        overview(observatory, "three")


def test_the_history_shows_whole_spans_and_gaps() -> None:
    host, observatory, clock = watched()
    _, first = run_steps(host, "e", 50, clock=clock, step_s=0.2)
    clock.now_s += 20.0
    run_steps(host, "e", 25, clock=clock, step_s=0.2)
    history = overview(observatory)["history"]
    known = [value is not None for value in history["tokens_per_s"]]
    gap = "".join("x" if there else " " for there in known).strip()
    assert " " * 9 in gap
    assert len(history["at_s"]) == len(known) >= 30
    assert np.allclose(np.diff(history["at_s"]), history["bucket_s"])
    rate = [value for value in history["tokens_per_s"] if value is not None]
    slowest, fastest = min(rate), max(rate)
    mean = 1e3 * sum(int(o.emitted.sum()) for _, _, o in first)
    mean /= sum(float(o.step_ms) for _, _, o in first)
    assert slowest <= mean <= fastest


@pytest.mark.parametrize("policy", ["pilot", "fixed", "none"])
@pytest.mark.parametrize("steps", [0, 1, 60])
def test_figures_are_plain_json_whatever_is_known(policy: str, steps: int) -> None:
    host, observatory, clock = watched(policy)
    if steps:
        run_steps(host, "e", steps, clock=clock, step_s=0.1)
    view = overview(observatory)
    drawn = figures(view)
    json.dumps([view, drawn], allow_nan=False)
    assert len(drawn) == 6
    for figure in drawn.values():
        assert {"data", "layout"} <= set(figure)
        assert all(len(trace["x"]) == len(trace["y"]) for trace in figure["data"])
    if policy == "none" and steps:
        assert view["totals"]["drafting_share"] == 0.0


def test_a_task_is_named_by_its_usual_tag_or_its_hash() -> None:
    assert task_name(task_id("code")) == "code"
    assert task_name(0) == "unknown"
    assert task_name(0xABC) == "task 00000abc"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (0.123456789, 0.123457),
        (1234567890.123, 1234567890.123),
        (np.array([1.0, np.nan]), [1.0, None]),
        ({"a": [np.float64(2.0)]}, {"a": [2.0]}),
    ],
)
def test_plain_values(value: Any, expected: Any) -> None:
    assert plain(value) == expected


def test_what_is_not_known_is_a_dash() -> None:
    assert [number(None), share(None), gain(None)] == ["-"] * 3
    assert [number(12345.6), share(0.256), gain(1.2)] == ["12,346", "26%", "1.20x"]
