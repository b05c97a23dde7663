"""Loads to train on: what a scenario asks for, without when it asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from parlay.policies.types import Array
from parlay.sim.costs import TableCosts, load_costs
from parlay.sim.episode import BLOCK_TOKENS
from parlay.sim.load import arrivals_of
from parlay.sim.scenario import Scenario
from parlay.sim.workload import Arrival

POOL = 4096
"""Requests of a stage to draw from."""


@dataclass(slots=True, frozen=True)
class Kind:
    """A load to train on: costs, requests at once, and a pool of requests to draw from.

    task, prompt_tokens, output_tokens and cached_tokens [pool], those of the prompt not to compute;
    tasks by name in `names`.
    """

    costs: TableCosts
    concurrency: int
    names: tuple[str, ...]
    task: Array
    prompt_tokens: Array
    output_tokens: Array
    cached_tokens: Array
    catches_up: bool


def kinds_of(scenario: Scenario, seed: int) -> list[Kind]:
    """Return one kind a stage; an open loop becomes a closed one of its mean concurrency."""
    costs, found = load_costs(scenario.costs), []
    if not isinstance(costs, TableCosts):
        raise ValueError(f"scenario {scenario.name}: costs '{scenario.costs}' have no tables")
    # When requests come does not matter here: as soon as one ends, the next begins.
    at_any_rate = {**scenario.arrivals, "rate_scale": 1.0} if scenario.arrivals else {}
    arrivals = arrivals_of(replace(scenario, arrivals=at_any_rate))
    for stage in scenario.stages:
        names = tuple(stage.mix)
        pool = list(islice(arrivals(stage, seed), POOL))
        if not pool:
            raise ValueError(f"scenario {scenario.name}: its trace has no requests")
        task = np.array([names.index(a.task) for a in pool], np.intp)
        prompt = np.array([a.prompt_tokens for a in pool])
        output = np.array([a.output_tokens for a in pool])
        rows = stage.concurrency or round(float(scenario.arrivals["mean_concurrency"]))
        cached = cached_tokens(pool) if scenario.prefix_cache else np.zeros_like(prompt)
        task, prompt, output, cached = (
            np.resize(column, POOL) for column in (task, prompt, output, cached)
        )
        found.append(Kind(costs, rows, names, task, prompt, output, cached, scenario.catches_up))
    return found


def cached_tokens(pool: Sequence[Arrival]) -> Array:
    """Return how many prompt tokens of each request whole blocks of a prefix cache hold."""
    shared = np.array([min(a.shared_prefix_tokens, a.prompt_tokens - 1) for a in pool])
    cached: Array = shared // BLOCK_TOKENS * BLOCK_TOKENS
    return cached
