from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from parlay.engine.demo.soundness import (
    Agreement,
    Divergence,
    compare,
    first_difference,
    judge,
    rates,
)
from parlay.policies.types import Array


class Oracle:
    """At every place token 1 is best, 2 and 3 are `gap` and .05 behind; plain noise is .1."""

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def behind(
        self, prompt: int, output: Sequence[int], tokens: Sequence[tuple[int, int]]
    ) -> Array:
        assert all(place < len(output) for place, _ in tokens)
        return np.array([{1: 0.0, 2: self.gap, 3: 0.05}.get(token, 9.0) for _, token in tokens])

    def noise(self, outputs: Mapping[int, Sequence[int]], quantile: float) -> float:
        assert quantile == 0.999
        return 0.1


class Unasked:
    """Must not be asked."""

    def behind(
        self, prompt: int, output: Sequence[int], tokens: Sequence[tuple[int, int]]
    ) -> Array:
        raise AssertionError

    def noise(self, outputs: Mapping[int, Sequence[int]], quantile: float) -> float:
        raise AssertionError


def found(emitted: int, plain: int = 1) -> Agreement:
    """One prompt compared once with a divergence, and once plain, with or without one."""
    reference = {0: [1, 1, 1, 1]}
    spec = [Divergence("ngram-3", "chat@1", 0, 2, 1, emitted)]
    other = [Divergence("none", "chat@4", 0, 1, 1, 2)] * plain
    return Agreement(reference, {0: 1}, {0: 1}, spec, other)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 9], [1, 2, 3, 4]) == 2
    with pytest.raises(AssertionError, match="went on"):
        first_difference([1, 2], [1, 2, 3])


def test_nothing_to_judge() -> None:
    verdict = judge(Agreement({0: [1]}, {0: 3}, {0: 2}), Unasked())
    assert verdict["identical"] is True
    assert (verdict["outputs_compared"], verdict["divergent_outputs"]) == (3, 0)


def test_near_tie_is_sound() -> None:
    verdict = judge(found(emitted=2), Oracle(gap=0.05))
    assert verdict["identical"] is True
    assert (verdict["sound_divergences"], verdict["unsound"]) == (1, [])
    assert verdict["largest_gap"] == pytest.approx(0.05)


def test_wide_gap_is_not_sound() -> None:
    verdict = judge(found(emitted=2), Oracle(gap=0.2))
    assert verdict["identical"] is False
    assert verdict["unsound"][0]["why"] == "0.2000 behind the best"
    assert verdict["sound_divergences"] == 0


def test_a_token_far_behind_is_not_sound_whatever_the_runner_up_is() -> None:
    verdict = judge(found(emitted=7), Oracle(gap=0.001))
    assert verdict["identical"] is False
    assert verdict["unsound"][0]["why"] == "9.0000 behind the best"
    assert verdict["largest_gap"] == 9.0


def test_the_third_of_a_tie_of_three_is_sound() -> None:
    assert judge(found(emitted=3), Oracle(gap=0.01))["identical"] is True


def test_a_reference_far_behind_is_not_sound() -> None:
    agreement = found(emitted=2)
    agreement.divergences[0] = dataclasses.replace(agreement.divergences[0], expected=7)
    assert judge(agreement, Oracle(gap=0.0))["identical"] is False


def test_diverging_more_often_than_plain_decoding_is_not_sound() -> None:
    prompts = range(10)
    spec = [Divergence("ngram-3", "chat@1", p, 0, 1, 2) for p in prompts]
    plain = [Divergence("none", "chat@4", p, 0, 1, 2) for p in prompts]
    once = dict.fromkeys(prompts, 1)
    reference = {p: [1, 1] for p in prompts}
    rare = judge(Agreement(reference, once, once, spec, plain[:2]), Oracle(0.01))
    assert rare["sound_divergences"] == 10
    assert rare["rate"]["higher"] is True
    assert rare["identical"] is False
    equal = judge(Agreement(reference, once, once, spec, plain), Oracle(0.01))
    assert equal["identical"] is True


def test_a_difference_within_chance_is_not_higher() -> None:
    prompts = range(20)
    once = dict.fromkeys(prompts, 1)
    spec = [Divergence("gate", "chat@1", p, 0, 1, 2) for p in (0, 1, 2, 3)]
    plain = [Divergence("none", "chat@4", p, 0, 1, 2) for p in (4, 5, 6)]
    verdict = rates(Agreement({}, once, once, spec, plain))
    assert verdict["speculating"] == pytest.approx(0.2)
    assert verdict["plain_at_other_row_counts"] == pytest.approx(0.15)
    assert verdict["higher"] is False


def test_compare_takes_the_first_plain_output_at_the_lowest_concurrency() -> None:
    from parlay.engine.demo.budget import QUICK, Costs
    from parlay.engine.demo.run import DemoRun
    from parlay.engine.demo.steps import StepLog
    from parlay.engine.demo.workload import Cell, CellRun, Shape

    def done(*outputs: list[int]) -> CellRun:
        return CellRun(1.0, 1, StepLog(), [(0, o) for o in outputs])

    cells = [Cell("chat", 1, (0,)), Cell("chat", 4, (0, 0))]
    one = {
        "none": [done([1, 2]), done([1, 2], [1, 3])],
        "gate": [done([1, 2]), done([1, 2], [4, 2])],
    }
    run = DemoRun(QUICK, Shape(1, 2, {}, {}), Costs({}, 0.0), cells, [one])
    agreement = compare(run)
    assert agreement.reference == {0: [1, 2]}
    assert (agreement.compared, agreement.compared_plain) == ({0: 3}, {0: 2})
    assert agreement.divergences == [Divergence("gate", "chat@4", 0, 0, 1, 4)]
    assert agreement.plain == [Divergence("none", "chat@4", 0, 1, 2, 3)]
