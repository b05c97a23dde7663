"""What was measured, as a cost profile that the simulator reads (`parlay simulate --costs FILE`).

A pass is a grid of times by batch, width and context; `sim/measured.py` says what of it must hold
and makes a cost model of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from parlay.engine.gpu_check.drafters import RowsCost
from parlay.engine.gpu_check.sweep import Grid

KIND = "parlay.gpu-check/1"
"""What a document of profiles says it is."""
MOST_BATCH = 32
"""Host times are taken at batches up to this: beyond, passes hide what the host does."""


def grid_profile(grid: Grid) -> dict[str, Any]:
    """Return a pass's grid: axes, and ms [batches][widths][contexts], null where left out."""
    return {
        "grid": {
            "batch": list(grid.axes.batches),
            "width": list(grid.axes.widths),
            "context_tokens": list(grid.axes.contexts),
            "ms": grid.table(),
        }
    }


def profile_of(
    source: str,
    target: Grid,
    draft: Grid,
    medusa: RowsCost,
    ngram: RowsCost,
    runs: Sequence[Mapping[str, Any]],
    edges: Sequence[int],
) -> dict[str, Any]:
    """Return a shape's profile; runs: rows of `engine_run`, from which the host's times are."""
    return {
        "source": source,
        "bucket_edges": list(edges),
        "off_edge_factor": 1.0,
        "overhead_ms": overhead_ms(runs),
        "target": grid_profile(target),
        "draft": grid_profile(draft),
        "draft_pass_ms": draft_pass_ms(runs, draft),
        "medusa": {"fixed_ms": medusa.fixed_ms, "row_ms": medusa.row_ms},
        "ngram": {"fixed_ms": ngram.fixed_ms, "row_ms": ngram.row_ms},
    }


def overhead_ms(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return what a plain step takes beside its pass: the median over small batches, 0 without."""
    plain = [r["host_ms"] for r in runs if r["mode"] == "none" and r["batch"] <= MOST_BATCH]
    known = [ms for ms in plain if ms == ms]
    return max(median(known), 0.0) if known else 0.0


def draft_pass_ms(runs: Sequence[Mapping[str, Any]], draft: Grid) -> float:
    """Return what a pass of the draft model takes in the engine beside what it takes alone.

    Of static modes at small batches, by the grid's cell of that batch, one token wide, whose
    context is nearest; the median, at least 0.
    """
    beside = []
    for row in runs:
        kind, _, depth = row["mode"].partition("-")
        if kind != "draft" or row["batch"] > MOST_BATCH or row["draft_ms"] != row["draft_ms"]:
            continue
        alone = [
            (abs(cell.context - row["context_tokens"]), ms)
            for cell, ms in draft.ms.items()
            if (cell.batch, cell.width) == (row["batch"], 1)
        ]
        if alone:
            beside.append(row["draft_ms"] / int(depth) - min(alone)[1])
    return max(median(beside), 0.0) if beside else 0.0
