"""Pictures of a fitted model of acceptance beside what was logged: one SVG a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parlay.policies.files import write_whole
from parlay.policies.types import Array, Proposer
from parlay.sim.acceptance_check import Goodness
from parlay.sim.report_style import FASTER, INK, MUTED, STYLE, svg, title

_NORMAL_95 = 1.96


def plot(path: Path, task: str, found: Sequence[Goodness]) -> None:
    """Write a task's picture, whole or not at all: a row a proposer, of hazards, runs and texts."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 2.6 * len(found)), layout="constrained")
        rows = figure.subplots(len(found), 3, squeeze=False)
        for axes, one in zip(rows, found, strict=True):
            name = Proposer(one.proposer).name.lower().replace("_", " ")
            _places(axes[0], one, f"{task}, {name}: holds if reached")
            _runs(axes[1], one)
            _texts(axes[2], one)
        rows[0][0].legend(frameon=False, fontsize=8)
        drawing = svg(figure, f"acceptance-{task}", f"Acceptance of {task}, logged and fitted")
    write_whole(path, lambda file: file.write(str(drawing)))


def _places(axes: Axes, one: Goodness, text: str) -> None:
    there = np.flatnonzero(one.reached > 0)
    share, count = one.observed[there], one.reached[there]
    half = _NORMAL_95 * np.sqrt(share * (1.0 - share) / count)
    axes.errorbar(there + 1, share, half, fmt="o", color=INK, markersize=4, label="logged")
    axes.plot(there + 1, one.foretold[there], color=FASTER, label="foretold by the fit")
    axes.set(ylim=(0, 1.02), xlabel="place in the draft")
    title(axes, text)


def _runs(axes: Axes, one: Goodness) -> None:
    there = np.arange(1 + int(np.flatnonzero(one.runs_foretold + one.runs > 0)[-1]))
    total = one.runs.sum()
    axes.bar(there, one.runs[there] / total, color="#d9dde2", edgecolor=MUTED, linewidth=0.5)
    axes.plot(there, one.runs_foretold[there] / total, "o-", color=FASTER, markersize=4)
    axes.set(xlabel="tokens that held")
    title(axes, "share of drafts")


def _texts(axes: Axes, one: Goodness) -> None:
    if one.rates.size:
        for rates in one.rates_simulated:
            axes.plot(*_steps(rates), color=FASTER, alpha=0.25, linewidth=0.8)
        axes.plot(*_steps(one.rates), color=INK, linewidth=1.6)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="share of a text's first tokens that hold")
    title(axes, "share of texts below it; blue: simulated")


def _steps(values: Array) -> tuple[Array, Array]:
    return np.sort(values), (np.arange(len(values)) + 0.5) / len(values)
