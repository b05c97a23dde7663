"""Where a scenario's requests come from: a closed loop, a public trace or its likeness, a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from parlay.policies.policy import make_policy
from parlay.sim.episode import run_episode
from parlay.sim.fitted import azure_code, azure_conv, mooncake_conversation
from parlay.sim.scenario import Scenario, Stage, tasks
from parlay.sim.traces import open_trace
from parlay.sim.workload import (
    Arrival,
    Lengths,
    Workload,
    assigned,
    at_once,
    closed_loop,
    scaled,
)

SHORTEST, LONGEST = 4, 8192
_FITTED = {
    "azure_code": azure_code,
    "azure_conv": azure_conv,
    "mooncake_conversation": mooncake_conversation,
}
_FILES = {
    "azure_code": "azure/AzureLLMInferenceTrace_code.csv",
    "azure_conv": "azure/AzureLLMInferenceTrace_conv.csv",
    "mooncake_conversation": "mooncake/conversation_trace.jsonl",
}
_SKIPPED_A_SEED = 101
_SETTLING_STEPS, _HALVINGS, _MOST_SCALE = 3000, 4, 1024.0
Arrivals = Callable[[Stage, int], Iterator[Arrival]]


def arrivals_of(scenario: Scenario) -> Arrivals:
    """Return what yields the requests of a stage, given a seed; a trace's file may end.

    A trace is named as one of the built-in ones, whose file is read where PARLAY_DATA has it and
    whose fitted likeness serves else, or as a file. Raises ValueError where there is no such trace.
    """
    trace = scenario.arrivals.get("trace") or scenario.lengths.get("trace")
    if trace is None:
        return _closed
    check_trace(trace)
    if not scenario.arrivals:
        return lambda stage, seed: at_once(_named(trace, seed, stage.mix))
    scale = float(scenario.arrivals["rate_scale"])
    return lambda stage, seed: scaled(_named(trace, seed, stage.mix), scale)


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


def check_trace(trace: str) -> None:
    """Refuse a trace that is neither built in nor a file."""
    if trace not in _FITTED and not Path(trace).is_file():
        raise ValueError(f"no trace '{trace}': give a file or one of {', '.join(sorted(_FITTED))}")


def _closed(stage: Stage, seed: int) -> Iterator[Arrival]:
    sizes = {
        tag: Lengths.log_normal(
            (*task.prompt, SHORTEST, LONGEST), (*task.output, SHORTEST, LONGEST)
        )
        for tag, task in tasks().items()
    }
    return closed_loop(stage.mix, sizes, seed)


def _named(trace: str, seed: int, mix: Mapping[str, float]) -> Workload:
    path = _path_of(trace)
    if path is None:
        return _FITTED[trace](seed, mix)
    # Seeds differ in where they begin; the first arrival sets the clock.
    rows = islice(iter(open_trace(path)), _SKIPPED_A_SEED * (seed % 7), None)
    return assigned(_from_zero(rows), mix, seed)


def _path_of(trace: str) -> Path | None:
    if trace not in _FITTED:
        return Path(trace)
    folder = os.environ.get("PARLAY_DATA")
    path = Path(folder) / _FILES[trace] if folder else None
    return path if path is not None and path.is_file() else None


def _from_zero(rows: Iterator[Arrival]) -> Workload:
    start_s: float | None = None
    for row in rows:
        start_s = row.arrival_s if start_s is None else start_s
        yield Arrival(
            row.arrival_s - start_s,
            row.task,
            row.prompt_tokens,
            row.output_tokens,
            row.shared_prefix_tokens,
        )
