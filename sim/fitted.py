"""Workloads like public traces, for a machine without the traces: from tables of their quantiles.

`data/workloads.json` holds the tables, their sources and licences. Gaps and lengths have the
traces' quantiles; gaps come in spells as the traces' do; prompt, output and time are independent of
each other, which in the traces they nearly are (rank correlations below .08). Where prompts share a
prefix there are two kinds of request, those with at most a block in common and those that go on
from an earlier one; for each, the shared and the own part of the prompt are independent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.types import Array
from parlay.sim.arrivals import Quantiles, Times, batches, correlated
from parlay.sim.workload import (
    BLOCK_TOKENS,
    Arrival,
    Lengths,
    MixedLengths,
    Workload,
    open_loop,
)

TABLES = Path(__file__).parent / "data" / "workloads.json"

_WITHIN = np.concatenate(
    [
        [0.001, 0.003, 0.01, 0.025],
        np.arange(1, 20) * 0.05,
        [0.975, 0.985, 0.99, 0.993, 0.995, 0.997, 0.998, 0.999, 0.9993, 0.9996],
    ]
)


def azure_code(seed: int, mix: Mapping[str, float] | None = None) -> Workload:
    """Return arrivals like Azure's code trace: very bursty, short outputs."""
    return _workload("azure_code", seed, mix or {"code": 1.0})


def azure_conv(seed: int, mix: Mapping[str, float] | None = None) -> Workload:
    """Return arrivals like Azure's conversation trace: even, outputs of 130 or of 420 tokens."""
    return _workload("azure_conv", seed, mix or {"chat": 1.0})


def mooncake_conversation(seed: int, mix: Mapping[str, float] | None = None) -> Workload:
    """Return arrivals like Mooncake's conversations: long prompts, a third of them shared."""
    return _workload("mooncake_conversation", seed, mix or {"chat": 1.0})


@cache
def tables() -> Mapping[str, Any]:
    """Return each trace's table by name."""
    found: Mapping[str, Any] = json.loads(TABLES.read_text(encoding="utf-8"))
    return found


def fit(trace: Iterable[Arrival]) -> dict[str, Any]:
    """Return the table of a trace, but for its spells: correlation and memory are set by hand.

    They were taken so that counts in windows of 1 to 300 s disperse as the trace's do. Holds the
    whole trace; the first arrival, which can share nothing, gives no length.
    """
    rows = [(a.arrival_s, a.prompt_tokens, a.output_tokens, a.shared_prefix_tokens) for a in trace]
    time_s, prompt, output, shared = np.array(rows, float)[1:].T
    moments, sizes = np.unique(np.append(rows[0][0], time_s), return_counts=True)
    together = len(moments) < len(rows) / 2
    pace = (
        {"period_s": round(float(np.diff(moments).mean()), 3), "batch": _quantiles(sizes)}
        if together
        else {"gap_s": _quantiles(np.diff(moments))}
    )
    goes_on = shared > BLOCK_TOKENS
    kinds = []
    for kind in (~goes_on, goes_on):
        if kind.any():
            own = np.maximum(prompt - shared, 1.0)[kind]
            kinds.append({"share": round(float(kind.mean()), 4), "prompt": _quantiles(own)})
            kinds[-1]["output"] = _quantiles(output[kind])
            if shared.any():
                kinds[-1]["shared"] = _quantiles(shared[kind])
    return {"requests": len(rows), **pace, "kinds": kinds}


def levels(requests: int) -> Array:
    """Return the levels [n] of a trace's quantiles; the ends stand for its extremes."""
    return np.concatenate([[0.5 / requests], _WITHIN, [1.0 - 0.5 / requests]])


def _quantiles(values: Array) -> list[float]:
    found = np.quantile(values, [0.0, *_WITHIN, 1.0])
    return [float(f"{value:.4g}") for value in found]


def _workload(name: str, seed: int, mix: Mapping[str, float]) -> Workload:
    table = tables()[name]
    kinds = tuple(
        Lengths(
            _of(table, kind["prompt"]),
            _of(table, kind["output"]),
            _of(table, kind["shared"]) if "shared" in kind else None,
        )
        for kind in table["kinds"]
    )
    shares = tuple(kind["share"] for kind in table["kinds"])
    return open_loop(_times(table, seed), mix, MixedLengths(shares, kinds), seed)


def _times(table: Mapping[str, Any], seed: int) -> Times:
    if "batch" in table:
        return batches(table["period_s"], _of(table, table["batch"]), seed)
    gaps = _of(table, table["gap_s"])
    return correlated(gaps, table["correlation"], table["memory"], seed)


def _of(table: Mapping[str, Any], values: list[float]) -> Quantiles:
    return Quantiles.of_table(levels(table["requests"]).tolist(), values)
