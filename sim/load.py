"""Where a scenario's requests come from: a closed loop, a public trace or its likeness, a file."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from parlay.policies.types import PROPOSERS
from parlay.sim.arrivals import Quantiles
from parlay.sim.counterfactual import TraceLuck, read_traces
from parlay.sim.feed import Arrivals
from parlay.sim.fitted import azure_code, azure_conv, mooncake_conversation
from parlay.sim.latent import Latents, Luck
from parlay.sim.laws import Task
from parlay.sim.scenario import Scenario, Stage
from parlay.sim.traces import open_trace
from parlay.sim.workload import (
    Arrival,
    Lengths,
    MixedLengths,
    Sizes,
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


def arrivals_of(scenario: Scenario) -> Arrivals:
    """Return what yields the requests of a stage, given a seed; a trace's file may end.

    A trace is named as one of the built-in ones, whose file is read where PARLAY_DATA has it and
    whose fitted likeness serves else, or as a file. Raises ValueError where there is no such trace.
    """
    if scenario.replays:
        return _replayed(Path(scenario.acceptance))
    trace = scenario.arrivals.get("trace") or scenario.lengths.get("trace")
    if trace is None:
        return lambda stage, seed: _closed(scenario, stage, seed)
    check_trace(trace)
    if not scenario.arrivals:
        return lambda stage, seed: at_once(_named(trace, seed, stage.mix))
    scale = float(scenario.arrivals["rate_scale"])
    return lambda stage, seed: scaled(_named(trace, seed, stage.mix), scale)


def luck_of(scenario: Scenario, depth: int, seed: int) -> tuple[Luck, dict[str, int], int]:
    """Return the requests' luck, its index of each task's tag, and the proposers it knows."""
    if scenario.replays:
        recorded = list(read_traces(Path(scenario.acceptance)))
        tags = dict.fromkeys(request.task for request in recorded)
        luck = TraceLuck(recorded, depth, first_line(seed))
        return luck, {tag: i for i, tag in enumerate(tags)}, luck.proposer_mask
    names, known = scenario.tasks, scenario.catalogue
    latents = Latents([known[name].law for name in names], depth, seed)
    mask = (1 << PROPOSERS) - 1
    if scenario.acceptance:
        there = frozenset[int]().union(*(known[name].proposers for name in names))
        mask = 1 | sum(1 << proposer for proposer in there)
    return latents, {name: i for i, name in enumerate(names)}, mask


def first_line(seed: int) -> int:
    """Return the line of a recording at which a start of this seed begins."""
    return _SKIPPED_A_SEED * seed


def _replayed(path: Path) -> Arrivals:
    recorded = list(read_traces(path))

    def arrivals(stage: Stage, seed: int) -> Iterator[Arrival]:
        for number in itertools.count(first_line(seed)):
            request = recorded[number % len(recorded)]
            yield Arrival(0.0, request.task, request.prompt_tokens, request.output_tokens)

    return arrivals


def check_trace(trace: str) -> None:
    """Refuse a trace that is neither built in nor a file."""
    if trace not in _FITTED and not Path(trace).is_file():
        raise ValueError(f"no trace '{trace}': give a file or one of {', '.join(sorted(_FITTED))}")


def _closed(scenario: Scenario, stage: Stage, seed: int) -> Iterator[Arrival]:
    sizes = {
        tag: _prefixed(scenario, _lengths_of(task)) for tag, task in scenario.catalogue.items()
    }
    return closed_loop(stage.mix, sizes, seed)


def _lengths_of(task: Task) -> Lengths:
    return Lengths.log_normal((*task.prompt, SHORTEST, LONGEST), (*task.output, SHORTEST, LONGEST))


def _prefixed(scenario: Scenario, own: Lengths) -> Sizes:
    """Return the lengths of requests of which a share begins with a text that they all know."""
    if not scenario.shared_prefix:
        return own
    share, tokens = scenario.shared_prefix["share"], scenario.shared_prefix["tokens"]
    known = dataclasses.replace(own, shared=Quantiles.log_normal(tokens, 0.0, tokens, tokens))
    return known if share >= 1.0 else MixedLengths((share, 1.0 - share), (known, own))


def _named(trace: str, seed: int, mix: Mapping[str, float]) -> Workload:
    path = _path_of(trace)
    if path is None:
        return _FITTED[trace](seed, mix)
    # Seeds differ in where they begin; the first arrival sets the clock.
    rows = itertools.islice(iter(open_trace(path)), _SKIPPED_A_SEED * (seed % 7), None)
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
        yield dataclasses.replace(row, arrival_s=row.arrival_s - start_s)
