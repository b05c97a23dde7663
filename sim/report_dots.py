"""A scenario's policies against no speculation, with intervals; references stand as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from parlay.sim.report_rank import loses, oracle, reference
from parlay.sim.report_style import FASTER, INK, LETTERS, MUTED, SLOWER, STYLE, svg, two_lines
from parlay.sim.rows import NONE, Row

_ABOVE_POINTS = 16.0
"""How high above the picture the labels of lines stand."""


def dots(scenario: str, rows: Sequence[Row]) -> Markup:
    """Draw ratio_to_none with its interval; none, the statics and the oracles as lines."""
    with mpl.rc_context(STYLE):
        lines = {r.policy: r.ratio_to_none for r in rows if np.isfinite(r.ratio_to_none)}
        lines = {p: v for p, v in lines.items() if reference(p) or oracle(p)}
        shown = [r for r in rows if r.policy != NONE and not oracle(r.policy)]
        shown.sort(key=lambda r: (np.isfinite(r.ratio_to_none), r.ratio_to_none))
        figure = Figure(figsize=(11, 1.25 + 0.27 * max(len(shown), 2)), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(shown):
            _dot(axes, place, row)
        ends = [v for r in shown for v in (r.ratio_to_none, *r.ci95)] + list(lines.values())
        low, high = _ends([v for v in ends if np.isfinite(v)])
        axes.set(xlim=(low, high), ylim=(-1.1, max(len(shown), 1) - 0.3))
        axes.axvspan(low, 1, color=SLOWER, alpha=0.055, linewidth=0)
        axes.set_yticks(range(len(shown)), [two_lines(r.policy) for r in shown])
        for tick, row in zip(axes.get_yticklabels(), shown, strict=True):
            tick.set_fontstyle("italic" if reference(row.policy) else "normal")
        axes.set_xlabel("goodput over that of no speculation, with its 95% interval")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
        for side, text, colour in ((-4, "slower", SLOWER), (4, "faster", FASTER)):
            _beside_one(axes, text, colour, side)
        axes.tick_params(length=0)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        _reference_lines(axes, lines, low, high)
        said = [f"{r.policy} {r.ratio_to_none:.2f}" for r in reversed(shown)]
        said += [f"{p} {v:.2f}" for p, v in lines.items() if oracle(p)]
        alt = f"Dot plot of goodput over no speculation in {scenario}: {', '.join(said)}."
        return svg(figure, f"dots-{scenario}", alt)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min([1.0, *values]), max([1.0, *values])
    pad = 0.05 * max(high - low, 0.1)
    return low - pad, high + pad


def _dot(axes: Axes, place: int, row: Row) -> None:
    low, high = row.ci95
    colour = SLOWER if loses(row.ratio_to_none) else FASTER
    fill = "white" if reference(row.policy) else colour
    if np.isfinite(row.ratio_to_none):
        axes.hlines(place, low, high, color=colour, linewidth=2.2, alpha=0.55)
        axes.plot(
            row.ratio_to_none,
            place,
            "v" if colour == SLOWER else "o",
            markersize=7,
            color=colour,
            markerfacecolor=fill,
        )


def _beside_one(axes: Axes, text: str, colour: str, points: int) -> None:
    axes.annotate(
        text,
        (1, 0),
        (points, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if points > 0 else "right",
        fontsize=8,
        color=colour,
        bbox={"facecolor": "white", "linewidth": 0, "alpha": 0.8, "pad": 1},
    )


def _reference_lines(axes: Axes, lines: Mapping[str, float], low: float, high: float) -> None:
    """Draw the lines; labels stand in one row and lean away from one another."""
    names = sorted(lines, key=lambda name: lines[name])
    labels = [f"{name.replace('_', ' ')} {lines[name]:.2f}" for name in names]
    halves = [(high - low) * (len(label) + 2) / LETTERS / 2 for label in labels]
    above = 1 + _ABOVE_POINTS / (axes.get_window_extent().height * 72 / axes.figure.dpi)
    for name, label, x in zip(
        names, labels, spread([lines[name] for name in names], halves), strict=True
    ):
        colour = MUTED if oracle(name) else INK
        style = ":" if oracle(name) else "-" if name == NONE else "--"
        axes.axvline(lines[name], color=colour, linewidth=1.1, linestyle=style, zorder=1)
        axes.annotate(
            label,
            (lines[name], 1),
            (x, above),
            xycoords=("data", "axes fraction"),
            textcoords=("data", "axes fraction"),
            ha="center",
            fontsize=8,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0.5, 0),
            },
        )


def spread(at: Sequence[float], halves: Sequence[float]) -> list[float]:
    """Return centres near `at`, ascending, for labels of half widths that must not overlap.

    Pushing right and pushing left both keep them apart, and so does the mean of the two.
    """

    def pushed(at: Sequence[float], halves: Sequence[float]) -> list[float]:
        out: list[float] = []
        for i, x in enumerate(at):
            out.append(max(x, out[-1] + halves[i - 1] + halves[i]) if out else x)
        return out

    left = [-x for x in pushed([-x for x in reversed(at)], list(reversed(halves)))]
    return [(a + b) / 2 for a, b in zip(pushed(at, halves), reversed(left), strict=True)]
