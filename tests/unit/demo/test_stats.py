from __future__ import annotations

from dataclasses import dataclass

import pytest

from parlay.engine.demo import stats


@dataclass
class Run:
    seconds: float
    tokens: int = 100


def rounds_of(*tables: dict[str, list[float]]) -> list[dict[str, list[Run]]]:
    """Make rounds from seconds by mode and cell; every cell emits 100 tokens."""
    return [{mode: [Run(s) for s in row] for mode, row in table.items()} for table in tables]


def test_ratio_is_paired_within_a_round() -> None:
    # The machine is twice as slow in the second round: the ratio does not see it.
    rounds = rounds_of(
        {"none": [2.0], "adaptive": [1.0]},
        {"none": [4.0], "adaptive": [2.0]},
        {"none": [2.0], "adaptive": [1.25]},
    )
    assert stats.paired_ratios(rounds, "adaptive", [0]) == pytest.approx([2.0, 2.0, 1.6])
    assert stats.median_ratio(rounds, "adaptive", [0]) == pytest.approx(2.0)


def test_speed_is_all_tokens_over_all_time() -> None:
    rounds = rounds_of({"none": [1.0, 3.0]})
    assert stats.speed(rounds, "none", [0, 1]) == pytest.approx(200 / 4)


def test_best_static_is_chosen_on_one_half_and_measured_on_the_other() -> None:
    lucky = {"none": [2.0], "a": [1.0], "b": [1.6], "adaptive": [1.0]}
    sober = {"none": [2.0], "a": [1.9], "b": [1.6], "adaptive": [1.25]}
    found = stats.best_static(rounds_of(lucky, sober, lucky, sober), ["none", "a", "b"], [0])
    assert found.name == "a"
    assert found.ratio_to_none == pytest.approx(2.0 / 1.9)
    assert found.adaptive_ratio_to_none == pytest.approx(1.6)


def test_no_speculation_may_be_the_best_static() -> None:
    table = {"none": [1.0], "a": [1.1], "adaptive": [1.0]}
    found = stats.best_static(rounds_of(table, table), ["none", "a"], [0])
    assert (found.name, found.ratio_to_none) == ("none", 1.0)


def test_one_round_serves_both_halves() -> None:
    rounds = rounds_of({"none": [1.0]})
    choosing, measuring = stats.halves(rounds)
    assert choosing == measuring == rounds


def test_headroom_closed() -> None:
    # Cell 0 likes a, cell 1 likes b; either alone takes 3 s, the choice 2 s, adaptive 2.4 s.
    table = {"none": [2.0, 2.0], "a": [1.0, 2.0], "b": [2.5, 1.0], "adaptive": [1.2, 1.2]}
    found = stats.per_cell_best(rounds_of(table, table), ["none", "a", "b"], [0, 1])
    assert found.picks == ["a", "b"]
    assert found.best_static.name == "a"
    assert found.ratio_to_none == pytest.approx(2.0)
    assert found.headroom == pytest.approx(0.5)
    assert found.closed == pytest.approx((3.0 / 2.4 - 1) / 0.5)


def test_little_headroom_is_not_judged() -> None:
    table = {"none": [1.0, 1.0], "a": [0.5, 0.5], "b": [0.49, 0.52], "adaptive": [0.5, 0.5]}
    found = stats.per_cell_best(rounds_of(table, table), ["none", "a", "b"], [0, 1])
    assert 0 < found.headroom < stats.HEADROOM_FLOOR
    assert found.closed is None


def test_picks_do_not_look_at_the_measuring_half() -> None:
    even = {"none": [1.0], "a": [0.5], "b": [0.9], "adaptive": [1.0]}
    odd = {"none": [1.0], "a": [2.0], "b": [0.4], "adaptive": [1.0]}
    found = stats.per_cell_best(rounds_of(even, odd), ["none", "a", "b"], [0])
    assert found.picks == ["a"]
    assert found.ratio_to_none == pytest.approx(0.5)


def test_worst_cell() -> None:
    table = {"none": [1.0, 1.0, 1.0], "adaptive": [0.5, 1.05, 0.9]}
    cell, ratio = stats.worst_cell(rounds_of(table), [0, 1, 2])
    assert cell == 1
    assert ratio == pytest.approx(1 / 1.05)
