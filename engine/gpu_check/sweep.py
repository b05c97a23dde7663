"""Verify passes over a grid of batch, width and context, as much of it as time and memory allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlay.engine.gpu_check.budget import Budget
from parlay.engine.gpu_check.floor import Floor
from parlay.engine.gpu_check.passes import Cell

BAR_RATIO = 1.3
"""A verify pass at a batch of at most BAR_BATCH takes so many times its byte floor at most."""
BAR_BATCH = 32
_CELL_S = 0.06


@dataclass(slots=True, frozen=True)
class Axes:
    """The values of a grid's axes, ascending."""

    batches: tuple[int, ...]
    widths: tuple[int, ...]
    contexts: tuple[int, ...]

    def cells(self) -> list[Cell]:
        """Return every cell, batch by batch."""
        return [Cell(b, w, c) for b in self.batches for w in self.widths for c in self.contexts]

    @property
    def corners(self) -> list[Cell]:
        """Return the cells at the ends of the axes, which say how dear the whole grid is."""
        ends = [sorted({axis[0], axis[-1]}) for axis in (self.batches, self.widths, self.contexts)]
        return [Cell(b, w, c) for b in ends[0] for w in ends[1] for c in ends[2]]


FINE = Axes((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 3, 4, 5, 6, 8, 12, 16), (128, 1024, 4096))
GRIDS = (
    FINE,
    Axes((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16), (128, 1024, 4096)),
    Axes((1, 4, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16), (128, 1024)),
    Axes((1, 4, 32, 256), (1, 4, 16), (128, 1024)),
)
"""From fine to coarse; the finest that fits the time is measured."""
TINY_GRIDS = (
    Axes((1, 2, 4, 8), (1, 2, 4, 8), (16, 64, 128)),
    Axes((1, 4, 8), (1, 8), (16, 64)),
)
DRAFT_WIDTHS = (1, 4)

Measure = Callable[[Cell, float], float]
"""The time of a cell in ms, spending about so many seconds on it; nan where memory is short."""


@dataclass(slots=True)
class Grid:
    """What was measured: ms by cell; a cell of the axes that is not there was left out."""

    axes: Axes
    ms: dict[Cell, float]
    left_out: int

    def table(self) -> list[list[list[float | None]]]:
        """Return ms [batches][widths][contexts], None for what was left out."""
        a = self.axes
        return [
            [[self.ms.get(Cell(b, w, c)) for c in a.contexts] for w in a.widths] for b in a.batches
        ]


def sweep(
    grids: Sequence[Axes], fits: Callable[[Cell], bool], measure: Measure, budget: Budget
) -> Grid:
    """Measure the finest of `grids` (from fine to coarse) that its corners say there is time for.

    Coarse cells come before those that only fill in, so that a deadline cuts detail first.
    """
    found: dict[Cell, float] = {}
    for cell in filter(fits, grids[-1].corners):
        found[cell] = measure(cell, _CELL_S)
    mean_s = 1e-3 * float(np.nanmean(list(found.values())))
    # A warm-up and a trial beside what is spent on the repeats; at least three of those.
    each_s = max(_CELL_S, 3 * mean_s) + 2 * mean_s
    axes = grids[-1]
    for finer in grids[::-1]:
        if each_s * sum(map(fits, finer.cells())) <= budget.left_s:
            axes = finer
    for cell in filter(fits, ordered(axes, grids)):
        if cell not in found and not budget.over:
            found[cell] = measure(cell, _CELL_S)
    kept = {cell: ms for cell in axes.cells() if (ms := found.get(cell, math.nan)) > 0.0}
    return Grid(axes, kept, len(axes.cells()) - len(kept))


def ordered(axes: Axes, grids: Sequence[Axes]) -> Iterable[Cell]:
    """Return the cells of `axes`, those of coarser grids first."""
    coarse = {cell: level for level, grid in enumerate(grids) for cell in grid.cells()}
    return sorted(axes.cells(), key=lambda cell: (-coarse[cell], cell))


def rows_of(grid: Grid, floor: Floor) -> list[dict[str, Any]]:
    """Return each cell's time beside its floors."""
    rows = []
    for cell, ms in sorted(grid.ms.items()):
        floor_ms = floor.bytes_ms(cell.batch, cell.width, cell.context)
        rows.append(
            {
                "batch": cell.batch,
                "width": cell.width,
                "context_tokens": cell.context,
                "ms": ms,
                "byte_floor_ms": floor_ms,
                "arithmetic_floor_ms": floor.flops_ms(cell.batch, cell.width),
                "ratio": ms / floor_ms,
                "read_bound": floor.reads(cell.batch, cell.width, cell.context),
            }
        )
    return rows


def bar_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the byte floor's bar on what is bound by reading; the others are counted beside it.

    Where a pass's arithmetic alone takes longer than its bytes, no kernel could meet the bar.
    """
    here = [row for row in rows if row["batch"] <= BAR_BATCH]
    bound = [row for row in here if row["read_bound"]]
    worst = max((float(row["ratio"]) for row in bound), default=float("nan"))
    return {
        "bar": f"verify at batch <= {BAR_BATCH} within {BAR_RATIO}x of its byte floor",
        "cells": len(here),
        "read_bound": len(bound),
        "within": sum(row["ratio"] <= BAR_RATIO for row in bound),
        "within_of_all": sum(row["ratio"] <= BAR_RATIO for row in here),
        "worst": worst,
        "passed": bool(bound) and worst <= BAR_RATIO,
    }
