"""Workloads: tasks and lengths by index, scaling, and generators that are like their traces."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.policies.types import Array
from parlay.sim.arrivals import gamma, poisson
from parlay.sim.fitted import azure_code, azure_conv, fit, levels, mooncake_conversation, tables
from parlay.sim.traces import open_trace
from parlay.sim.workload import (
    Arrival,
    Lengths,
    MixedLengths,
    Workload,
    assigned,
    at_once,
    closed_loop,
    concurrency,
    describe,
    dispersion,
    open_loop,
    scaled,
    to_concurrency,
)

DATA = Path(os.environ.get("PARLAY_DATA", "../shared/data"))
FILES = {
    "azure_code": DATA / "azure" / "AzureLLMInferenceTrace_code.csv",
    "azure_conv": DATA / "azure" / "AzureLLMInferenceTrace_conv.csv",
    "mooncake_conversation": DATA / "mooncake" / "conversation_trace.jsonl",
}
MAKE: dict[str, Callable[[int], Workload]] = {
    "azure_code": azure_code,
    "azure_conv": azure_conv,
    "mooncake_conversation": mooncake_conversation,
}
SHORT = Lengths.log_normal((100, 0.5, 10, 1000), (20, 0.5, 1, 100))
LONG = Lengths.log_normal((5000, 0.5, 1001, 20000), (400, 0.5, 101, 2000))

with_data = pytest.mark.skipif(
    not FILES["azure_code"].exists(), reason="set PARLAY_DATA to the folder of public data"
)


def sizes(workload: Workload, n: int) -> list[tuple[str, int, int, int]]:
    found = islice(workload, n)
    return [(a.task, a.prompt_tokens, a.output_tokens, a.shared_prefix_tokens) for a in found]


def clock(workload: Workload, n: int) -> Array:
    return np.array([a.arrival_s for a in islice(workload, n)])


def test_a_closed_loop_has_its_mix_and_its_lengths_at_0_s() -> None:
    found = describe(closed_loop({"chat": 0.75, "edit": 0.25}, SHORT, 1), 20_000)
    assert found.count == 20_000
    assert isnan(found.rate_per_s)
    assert isnan(found.gap_cv)
    assert found.tasks == pytest.approx({"chat": 0.75, "edit": 0.25}, abs=0.01)
    assert found.prompt_p50 == pytest.approx(100, rel=0.03)
    assert found.output_p50 == pytest.approx(20, rel=0.05)
    assert found.prompt_p99 == pytest.approx(100 * np.exp(0.5 * 2.326), rel=0.05)


def test_each_task_may_have_lengths_of_its_own() -> None:
    mix = {"chat": 2.0, "edit": 1.0, "never": 0.0}
    of_task = {"chat": SHORT, "edit": LONG}
    for arrival in islice(closed_loop(mix, of_task, 3), 3000):
        assert (arrival.prompt_tokens > 1000) == (arrival.task == "edit")
        assert (arrival.output_tokens > 100) == (arrival.task == "edit")


def test_what_is_asked_depends_on_seed_and_index_alone() -> None:
    mix = {"chat": 0.5, "edit": 0.5}
    closed = sizes(closed_loop(mix, SHORT, 9), 3000)
    assert closed == sizes(open_loop(poisson(3.0, 9), mix, SHORT, 9), 3000)
    assert closed == sizes(open_loop(gamma(3.0, 9.0, 9), mix, SHORT, 9), 3000)
    assert closed == sizes(closed_loop({"edit": 0.5, "chat": 0.5}, SHORT, 9), 3000)
    assert closed != sizes(closed_loop(mix, SHORT, 10), 3000)
    # Another mix changes who asks, not how much.
    assert [s[1:] for s in closed] == [s[1:] for s in sizes(closed_loop({"x": 1}, SHORT, 9), 3000)]


def test_reading_one_workload_leaves_another_as_it_was() -> None:
    one, two = closed_loop({"a": 1.0}, SHORT, 4), closed_loop({"a": 1.0}, SHORT, 4)
    mixed = [(next(one), next(two)) for _ in range(2500)]
    assert all(a == b for a, b in mixed)


def test_a_finite_process_gives_a_finite_workload() -> None:
    found = list(open_loop(iter([np.arange(3.0)]), {"a": 1.0}, SHORT, 1))
    assert [a.arrival_s for a in found] == [0.0, 1.0, 2.0]


def test_kinds_of_request_are_mixed_whole() -> None:
    found = sizes(closed_loop({"a": 1.0}, MixedLengths((0.2, 0.8), (SHORT, LONG)), 1), 20_000)
    assert all((prompt > 1000) == (output > 100) for _, prompt, output, _ in found)
    assert np.mean([prompt > 1000 for _, prompt, _, _ in found]) == pytest.approx(0.8, abs=0.01)


def test_assigned_keeps_all_but_the_task() -> None:
    before = [Arrival(float(i), "", i + 1, 2 * i + 1, i) for i in range(5000)]
    after = list(assigned(before, {"code": 0.8, "edit": 0.2}, 5))
    assert [a.prompt_tokens for a in after] == [a.prompt_tokens for a in before]
    assert [a.shared_prefix_tokens for a in after] == [a.shared_prefix_tokens for a in before]
    assert np.mean([a.task == "code" for a in after]) == pytest.approx(0.8, abs=0.02)
    later = list(assigned(before[:100], {"code": 0.8, "edit": 0.2}, 5))
    assert later == after[:100]


@given(st.floats(0.01, 100.0))
def test_scaling_the_rate_changes_times_alone(factor: float) -> None:
    plain = [Arrival(1.5 * i, "a", i + 1, 2, i) for i in range(20)]
    for before, after in zip(plain, scaled(plain, factor), strict=True):
        assert after.arrival_s == pytest.approx(before.arrival_s / factor)
        assert sizes(iter([after]), 1) == sizes(iter([before]), 1)


def test_to_concurrency_meets_littles_law() -> None:
    def stay_s(output: int) -> float:
        return 0.2 + 0.015 * output

    found = to_concurrency(lambda: islice(azure_code(2), 5000), 24.0, stay_s)
    rows = list(found)
    assert concurrency(rows, stay_s) == pytest.approx(24.0)
    # By hand: requests' stays laid on the clock, over the clock.
    stays = [stay_s(a.output_tokens) for a in rows]
    assert sum(stays) / rows[-1].arrival_s == pytest.approx(24.0, rel=0.01)


def test_at_once_is_a_closed_loop_of_a_traces_requests() -> None:
    plain = [Arrival(1.5 * i, "a", i + 1, 2, i) for i in range(20)]
    found = list(at_once(plain))
    assert {a.arrival_s for a in found} == {0.0}
    assert sizes(iter(found), 20) == sizes(iter(plain), 20)


def test_lengths_may_be_taken_from_a_workload() -> None:
    source = closed_loop({"a": 1.0}, LONG, 1)
    copied = describe(closed_loop({"a": 1.0}, Lengths.empirical(source, 5000), 2), 20_000)
    true = describe(closed_loop({"a": 1.0}, LONG, 3), 20_000)
    for name in ("prompt_p50", "prompt_p99", "output_p50", "output_p99"):
        assert getattr(copied, name) == pytest.approx(getattr(true, name), rel=0.06)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a mix needs shares"):
        closed_loop({}, SHORT, 1)
    with pytest.raises(ValueError, match="a mix needs shares"):
        closed_loop({"a": -1.0, "b": 2.0}, SHORT, 1)
    with pytest.raises(ValueError, match="do not cover"):
        closed_loop({"a": 1.0, "b": 2.0}, {"a": SHORT}, 1)
    with pytest.raises(ValueError, match="factor above 0"):
        scaled([], 0.0)
    with pytest.raises(ValueError, match="no arrivals"):
        describe([])
    with pytest.raises(ValueError, match="cannot scale a mean concurrency of inf"):
        to_concurrency(lambda: closed_loop({"a": 1.0}, SHORT, 1), 4.0, float, 100)
    with pytest.raises(ValueError, match="two or more"):
        concurrency([Arrival(0.0, "a", 1, 1)], float)


@pytest.mark.parametrize(
    ("name", "cv", "output_p50", "shared"),
    [
        ("azure_code", 13.15, 13, 0.0),
        ("azure_conv", 1.094, 129, 0.0),
        ("mooncake_conversation", 3.034, 350, 0.3736),
    ],
)
def test_a_fitted_workload_has_the_figures_of_its_trace(
    name: str, cv: float, output_p50: float, shared: float
) -> None:
    found = describe(MAKE[name](1), 60_000)
    assert found.gap_cv == pytest.approx(cv, rel=0.1)
    assert found.output_p50 == pytest.approx(output_p50, rel=0.02)
    assert found.shared_prefix_share == pytest.approx(shared, rel=0.04)


@pytest.mark.parametrize("name", ["azure_code", "azure_conv"])
def test_a_fitted_workload_has_the_quantiles_of_its_table(name: str) -> None:
    table, rows = tables()[name], list(islice(MAKE[name](2), 30_000))
    level = levels(table["requests"])[4:-6]
    gaps = np.diff([a.arrival_s for a in rows])
    kind = table["kinds"][0]
    close = [(gaps, table["gap_s"], 0.3)]
    close.append((np.array([a.prompt_tokens for a in rows]), kind["prompt"], 0.1))
    close.append((np.array([a.output_tokens for a in rows]), kind["output"], 0.1))
    for drawn, quantiles, share in close:
        assert np.quantile(drawn, level) == pytest.approx(quantiles[4:-6], rel=share)


def test_the_code_trace_is_bursty_far_beyond_what_its_gaps_say_and_conv_swings_slowly() -> None:
    code, conv = clock(azure_code(3), 80_000), clock(azure_conv(3), 80_000)
    assert dispersion(code, 1.0) == pytest.approx(13.2, rel=0.25)
    assert dispersion(code, 10.0) == pytest.approx(71.0, rel=0.25)
    assert dispersion(conv, 1.0) == pytest.approx(1.4, rel=0.1)
    assert dispersion(conv, 10.0) == pytest.approx(4.0, rel=0.25)


def test_every_table_names_its_source_and_licence() -> None:
    assert set(tables()) == set(MAKE)
    for table in tables().values():
        assert ("Splitwise" in table["source"]) == (table["licence"] == "CC-BY-4.0")
        assert table["licence"] in ("CC-BY-4.0", "Apache-2.0")


@with_data
@pytest.mark.parametrize("name", list(FILES))
def test_the_tables_are_fits_of_the_traces(name: str) -> None:
    found = fit(open_trace(FILES[name]))
    assert found == {key: tables()[name][key] for key in found}


@with_data
@pytest.mark.parametrize("name", list(FILES))
def test_a_fitted_workload_is_like_its_trace(name: str) -> None:
    real = describe(open_trace(FILES[name]))
    like = describe(MAKE[name](4), 60_000)
    assert like.rate_per_s == pytest.approx(real.rate_per_s, rel=0.1)
    assert like.gap_cv == pytest.approx(real.gap_cv, rel=0.1)
    assert like.prompt_p50 == pytest.approx(real.prompt_p50, rel=0.05)
    assert like.prompt_p99 == pytest.approx(real.prompt_p99, rel=0.05)
    assert like.output_p50 == pytest.approx(real.output_p50, rel=0.02)
    assert like.output_p99 == pytest.approx(real.output_p99, rel=0.05)
    assert like.shared_prefix_share == pytest.approx(real.shared_prefix_share, rel=0.04)


@with_data
@pytest.mark.parametrize(("name", "window_s"), [("azure_code", 60.0), ("azure_conv", 60.0)])
def test_a_fitted_workload_bursts_like_its_trace(name: str, window_s: float) -> None:
    real = dispersion(np.array([a.arrival_s for a in open_trace(FILES[name])]), window_s)
    like = np.mean([dispersion(clock(MAKE[name](s), 9000), window_s) for s in range(8)])
    assert like == pytest.approx(real, rel=0.3)
