"""What `pilot` has beyond `goodput` must not cost what `goodput` makes, on any curve."""

from __future__ import annotations

import dataclasses

import pytest

from parlay.sim.keyed import run_side_by_side
from parlay.sim.load import arrivals_of
from parlay.sim.scenario import load_scenario
from parlay.sim.simulate import maker

SCENARIOS = ("moe", "chat_low", "edit_high")


@pytest.mark.parametrize(
    ("name", "steps", "least"),
    [(name, 160, 0.93) for name in SCENARIOS] + [(name, 300, 0.95) for name in SCENARIOS],
)
def test_pilot_is_as_fast_as_goodput(name: str, steps: int, least: float) -> None:
    scenario = dataclasses.replace(load_scenario(name).shortened(steps), warm_up_steps=10)
    makes = [maker(policy) for policy in ("pilot", "goodput")]
    pilot, goodput = run_side_by_side(scenario, makes, arrivals_of(scenario), [1, 1])
    assert pilot.goodput > least * goodput.goodput
