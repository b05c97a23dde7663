"""Graphs against launching kernel by kernel: the same pass both ways, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from parlay.engine.gpu_check.passes import Cell, Passes

BAR_SPEEDUP = 1.5
"""Replaying a graph is so many times as fast as launching its kernels, at batch 1."""
MOST_ERROR = 0.1
"""Padding changes how bfloat16 rounds, by a few per cent over dozens of layers; a graph that reads
what is not its step's gives other logits altogether."""
_ROUNDS = 5


def compare(passes: Passes, context: int, cell_s: float) -> list[dict[str, Any]]:
    """Return a row for each width at batch 1, and one at batch 8."""
    rows = []
    for batch, width in ((1, 1), (1, 4), (1, 8), (8, 4)):
        cell = Cell(batch, width, context)
        if passes.fits(cell):
            rows.append(_row(passes, cell, cell_s / (2 * _ROUNDS)))
    return rows


def _row(passes: Passes, cell: Cell, each_s: float) -> dict[str, Any]:
    assert passes.graphs is not None, "only graphs can be compared"
    replayed = passes.graphs.stats.replayed
    apart = logit_error(passes, cell)
    assert passes.graphs.stats.replayed > replayed, "a pass of this size has a graph"
    graph, eager = [], []
    for _ in range(_ROUNDS):
        graph.append(passes.time_ms(cell, each_s))
        eager.append(passes.time_ms(cell, each_s, eager=True))
    return {
        "batch": cell.batch,
        "width": cell.width,
        "context_tokens": cell.context,
        "graph_ms": median(graph),
        "eager_ms": median(eager),
        "speedup": median(e / g for e, g in zip(eager, graph, strict=True)),
        "logit_error": apart,
        "agrees": apart <= MOST_ERROR,
    }


def logit_error(passes: Passes, cell: Cell) -> float:
    """Return the largest difference of logits between both ways over the largest logit."""
    graph = passes.run(cell).logits.clone()
    eager = passes.run(cell, eager=True).logits
    return float((graph - eager).abs().max() / eager.abs().max())


def bar_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the speed of plain decoding at batch 1."""
    found = [r["speedup"] for r in rows if (r["batch"], r["width"]) == (1, 1)]
    return {
        "bar": f"graph replay at least {BAR_SPEEDUP}x eager at batch 1",
        "speedup": found[0] if found else None,
        "passed": bool(found) and found[0] >= BAR_SPEEDUP,
    }
