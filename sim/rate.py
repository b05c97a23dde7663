"""How fast an open loop's requests have to come for a wanted load."""

from __future__ import annotations

import dataclasses

from parlay.policies.policy import make_policy
from parlay.sim.episode import run_episode
from parlay.sim.load import arrivals_of
from parlay.sim.scenario import Scenario

_SETTLING_STEPS, _HALVINGS, _MOST_SCALE = 3000, 4, 1024.0


def settled(scenario: Scenario) -> Scenario:
    """Return an open loop with the rate at which plain decoding has its mean concurrency.

    Found by running it: arrivals in bursts queue in ways that no formula here foresees.
    """
    if not scenario.arrivals or "rate_scale" in scenario.arrivals:
        return scenario
    target = float(scenario.arrivals["mean_concurrency"])

    def at(scale: float) -> Scenario:
        return dataclasses.replace(scenario, arrivals={**scenario.arrivals, "rate_scale": scale})

    def rows(scale: float) -> float:
        trial = at(scale).shortened(_SETTLING_STEPS)
        found = run_episode(
            trial, lambda limits, _: make_policy("none", {}, limits), arrivals_of(trial), 0
        )
        return float(found.bucket_rows.sum()) / found.steps

    low = high = 1.0
    while rows(high) < target and high < _MOST_SCALE:
        low, high = high, 2.0 * high
    while rows(low) > target and low > 1.0 / _MOST_SCALE:
        low, high = 0.5 * low, low
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if rows(middle) < target else (low, middle)
    return at(low)
