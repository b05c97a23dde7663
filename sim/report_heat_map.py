"""The report's headline: policies by scenarios, in colours that say which are slower than none."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from parlay.sim.report_rank import Ranked, loses, oracle, reference
from parlay.sim.report_style import FASTER, INK, MUTED, SLOWER, STYLE, svg, two_lines

_LOSS = LinearSegmentedColormap.from_list("loss", ["#8f3600", "#e07b32", "#fcdcc0"])
_GAIN = LinearSegmentedColormap.from_list("gain", ["#dceaf7", "#6ba6dc", "#0d4a8c"])
# A step at 1: what loses a little must not look like what gains a little.
_DIVERGING = ListedColormap([*_LOSS(np.linspace(0, 1, 128)), *_GAIN(np.linspace(0, 1, 128))])
_LEAST_SPAN, _MOST_SPAN = np.log2(1.25), np.log2(3.0)
"""The scale reaches at least and at most this far from 1, in log2."""


def heat_map(ranked: Sequence[Ranked], scenarios: Sequence[str]) -> Markup:
    """Draw ratio_to_none of policies by scenarios, the geometric mean first, oracles apart."""
    with mpl.rc_context(STYLE):
        lines = [r for r in ranked if not oracle(r.policy)]
        lines += [r for r in ranked if oracle(r.policy)]
        first_oracle = sum(not oracle(r.policy) for r in ranked)
        tops = [i + (0.45 if i >= first_oracle else 0.0) for i in range(len(lines))]
        lefts = [0.0, *(1.25 + j for j in range(len(scenarios)))]
        names = [two_lines(r.policy) for r in lines]
        width, height = 0.74 * (lefts[-1] + 1), 0.3 * (tops[-1] + 1)
        label_in = 0.2 + 0.078 * max(len(part) for name in names for part in name.split("\n"))
        figure = Figure(figsize=(label_in + max(width, 5.4) + 0.3, height + 1.3))
        w, h = figure.get_size_inches()
        axes = figure.add_axes((label_in / w, 0.7 / h, width / w, height / h))
        axes.set(xlim=(0, lefts[-1] + 1), ylim=(tops[-1] + 1, 0))
        scale = _scale([r.ratios.get(s, np.nan) for r in lines for s in scenarios])
        best = _best_of(lines, scenarios)
        for top, line in zip(tops, lines, strict=True):
            real = not oracle(line.policy)
            _cell(axes, lefts[0], top, line.mean, scale, real and line.mean == best[0])
            for left, scenario, most in zip(lefts[1:], scenarios, best[1:], strict=True):
                ratio = line.ratios.get(scenario, float("nan"))
                _cell(axes, left, top, ratio, scale, real and ratio == most)
        _heat_ticks(axes, lefts, tops, ["geom.\nmean", *map(_broken, scenarios)], names)
        for tick, line in zip(axes.get_yticklabels(), lines, strict=True):
            tick.set(
                fontstyle="italic" if reference(line.policy) else "normal",
                color=MUTED if reference(line.policy) or oracle(line.policy) else INK,
            )
        _colour_bar(figure, scale, label_in / w, 4.2 / w, 0.34 / h, 0.13 / h)
        said = ", ".join(f"{r.policy} {r.mean:.2f}" for r in ranked)
        alt = f"Heat map of goodput over no speculation; geometric means: {said}."
        return svg(figure, "headline", alt)


def _best_of(lines: Sequence[Ranked], scenarios: Sequence[str]) -> list[float]:
    """Return the best mean and the best ratio of each scenario, oracles left out."""
    real = [r for r in lines if not oracle(r.policy)]
    columns = [[r.mean for r in real]]
    columns += [[r.ratios.get(s, float("nan")) for r in real] for s in scenarios]
    return [max((v for v in column if np.isfinite(v)), default=np.nan) for column in columns]


def _scale(ratios: Sequence[float]) -> Normalize:
    """Return a scale of log2 ratios, as far below 1 as above."""
    known = np.array([r for r in ratios if np.isfinite(r) and r > 0])
    far = np.abs(np.log2(known)).max() if len(known) else 0.0
    span = float(np.clip(far, _LEAST_SPAN, _MOST_SPAN))
    return Normalize(-span, span, clip=True)


def _cell(axes: Axes, left: float, top: float, ratio: float, scale: Normalize, best: bool) -> None:
    known = np.isfinite(ratio) and ratio > 0
    if not known:
        colour, text = "#f3f4f6", "\u2013"
    elif f"{ratio:.2f}" == "1.00":
        colour, text = "#ffffff", "1.00"
    else:
        colour = mpl.colors.to_hex(_DIVERGING(scale(np.log2(ratio))))
        text = f"▼ {ratio:.2f}" if loses(ratio) else f"{ratio:.2f}"
    axes.add_patch(Rectangle((left, top), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
    weight = "bold" if best else "normal"
    centre = (left + 0.5, top + 0.53)
    axes.text(*centre, text, ha="center", va="center", color=_readable(colour), weight=weight)


def _readable(colour: str) -> str:
    """Return white or ink, whichever stands out more (relative luminance as in WCAG 2)."""
    rgb = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return "white" if linear @ (0.2126, 0.7152, 0.0722) < 0.19 else INK


def _heat_ticks(
    axes: Axes, lefts: list[float], tops: list[float], across: list[str], down: list[str]
) -> None:
    axes.set_xticks([left + 0.5 for left in lefts], across)
    axes.set_yticks([top + 0.5 for top in tops], down)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _colour_bar(
    figure: Figure, scale: Normalize, left: float, width: float, bottom: float, height: float
) -> None:
    axes = figure.add_axes((left, bottom, width, height))
    bar = figure.colorbar(ScalarMappable(scale, _DIVERGING), cax=axes, orientation="horizontal")
    span = float(scale.vmax or 0.0) + 1e-9
    ticks = [t for t in (1 / 3, 0.5, 2 / 3, 0.8, 1, 1.25, 1.5, 2, 3) if abs(np.log2(t)) <= span]
    labels = [f"{t:.2g}" if t < 1 else f"{t:g}" for t in ticks]
    bar.set_ticks([float(np.log2(t)) for t in ticks], labels=labels)
    bar.outline.set_visible(False)
    axes.tick_params(length=0)
    axes.text(-0.01, 0.5, "slower", transform=axes.transAxes, ha="right", va="center", color=SLOWER)
    axes.text(1.01, 0.5, "faster than none", transform=axes.transAxes, va="center", color=FASTER)


def _broken(scenario: str) -> str:
    return scenario.replace("_", "\n", 1)
