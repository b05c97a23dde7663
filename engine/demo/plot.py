"""The demo's picture: who drafts and how many tokens, over the steps of the adaptive mode."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from parlay.engine.demo.run import DemoRun
from parlay.engine.demo.stats import ADAPTIVE
from parlay.policies.types import PROPOSERS, Array, Proposer

BINS = 600
_LEAST_ROOM = 0.01
"""Of the whole, between two names."""
_COLOURS = ("#c8c8c8", "#3b7dd8", "#e08a1e", "#5aa469")


def plot(run: DemoRun, path: Path) -> None:
    """Write a PNG; raises ValueError where it cannot be written."""
    import matplotlib as mpl  # slow to import, and only wanted here

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    seconds, rows, k, marks = _series(run)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(14, 7), sharex=True, layout="constrained")
    share = rows / np.maximum(rows.sum(1, keepdims=True), 1)
    used = [p for p in Proposer if rows[:, p].any()]
    top.stackplot(
        seconds,
        [share[:, p] for p in used],
        labels=[p.name.lower().replace("_", " ") for p in used],
        colors=[_COLOURS[p] for p in used],
        step="post",
    )
    top.set(ylabel="share of requests", ylim=(0, 1), title="adaptive: who drafts")
    for p in used:
        if p is not Proposer.NONE:
            seen = np.where(rows[:, p] > 0, k[:, p] / np.maximum(rows[:, p], 1), np.nan)
            bottom.plot(seconds, seen, ".", markersize=3, color=_COLOURS[p])
    mean = k.sum(1) / np.maximum(rows.sum(1), 1)
    bottom.plot(
        seconds,
        mean,
        color="black",
        linewidth=1,
        drawstyle="steps-post",
        label="mean over all requests",
    )
    bottom.set(ylabel="k, verified tokens", xlabel="seconds of the adaptive mode", ylim=(0, None))
    _mark(top, bottom, marks)
    for axes in (top, bottom):
        axes.legend(loc="upper right")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write the plot: {error}") from None
    finally:
        plt.close(figure)


def _mark(top: Any, bottom: Any, marks: list[tuple[float, str]]) -> None:
    """Draw where each cell begins; its name stands upright at the foot, where there is room."""
    room, last = _LEAST_ROOM * marks[-1][0] if marks else 0.0, -math.inf
    for at, name in marks:
        for axes in (top, bottom):
            axes.axvline(at, color="black", linewidth=0.3)
        if at - last < room:
            continue
        last = at
        top.text(at, 0.02, f" {name}", rotation=90, fontsize=6, verticalalignment="bottom")


def _series(run: DemoRun) -> tuple[Array, Array, Array, list[tuple[float, str]]]:
    """Return time bins [n], rows and k [n, proposers] summed in each, and where cells begin."""
    marks: list[tuple[float, str]] = []
    steps: list[tuple[float, Array, Array]] = []
    now_s = 0.0
    for by_mode in run.rounds:
        for cell, done in zip(run.cells, by_mode[ADAPTIVE], strict=True):
            marks.append((now_s, cell.label))
            for ms, rows, k in done.steps.timeline:
                now_s += ms / 1e3
                steps.append((now_s, rows, k))
    width_s = max(now_s / BINS, 1e-9)
    rows_sum, k_sum = np.zeros((BINS, PROPOSERS)), np.zeros((BINS, PROPOSERS))
    for at_s, rows, k in steps:
        index = min(int(at_s / width_s), BINS - 1)
        rows_sum[index] += rows
        k_sum[index] += k
    busy = rows_sum.sum(1) > 0
    return (np.arange(BINS) * width_s)[busy], rows_sum[busy], k_sum[busy], marks
