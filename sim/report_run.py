"""A policy over the run: goodput against the references, how much it drafts, and with whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter

from parlay.policies.types import Array, Proposer
from parlay.sim.report_style import FASTER, INK, LETTERS, MUTED, STYLE, svg, title
from parlay.sim.rows import BEST_STATIC, NONE
from parlay.sim.scenario import Scenario, Stage
from parlay.sim.tally import Episode

PROPOSER_COLOURS: Mapping[Proposer, str] = {
    Proposer.NONE: "#dfe2e6",
    Proposer.NGRAM: "#e6b800",
    Proposer.DRAFT_MODEL: "#2a9d78",
    Proposer.MEDUSA: "#7d5ba6",
}
"""Their lightness differs too, for print and for eyes that see hues alike."""
_WINDOW = 7
"""Buckets that a point of a line over the run is summed over."""
_LOG_FROM = 4.0
"""Goodput that changes by more than this with the load is drawn on a log scale."""


def over_run(scenario: Scenario, episodes: Mapping[str, list[Episode]], policy: str) -> Markup:
    """Draw goodput over the run against none and the best static, and what `policy` drafts."""
    with mpl.rc_context(STYLE):
        own = episodes[policy]
        buckets, steps = len(own[0].bucket_s), max(own[0].steps // scenario.runs, 1)
        x = (np.arange(buckets) + 0.5) * steps / buckets
        window = min(max(_WINDOW, 2 * buckets // steps), buckets)
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=[2.2, 1, 1.2])
        drawn = []
        for name, colour, style in _lines(policy):
            if name in episodes:
                drawn.append(per_bucket(episodes[name], "bucket_tokens", "bucket_s", window))
                label = name.replace("_", " ")
                top.plot(x, drawn[-1], style, color=colour, linewidth=1.5, label=label)
        starts = stage_starts(scenario, steps)
        _goodput_axis(top, np.concatenate(drawn), len(starts) > 1)
        middle.plot(
            x, per_bucket(own, "bucket_k", "bucket_rows", window), color=FASTER, linewidth=1.6
        )
        middle.set_ylim(bottom=0)
        title(middle, f"mean k of a request ({policy})")
        _shares(bottom, x, own, window)
        title(bottom, f"who drafts: shares of requests ({policy})")
        bottom.set(xlim=(0, steps), xlabel="measured step" + " of each start" * (scenario.runs > 1))
        _stages((top, middle, bottom), starts, steps)
        for axes in (top, middle):
            axes.grid(axis="y")
        for axes in (top, bottom):
            axes.legend(
                loc="center left",
                bbox_to_anchor=(1.005, 0.5),
                frameon=False,
                reverse=axes is bottom,  # as the areas lie on one another
            )
        alt = (
            f"Goodput of {policy}, none and the best static over the run of {scenario.name}; below "
            f"it the mean k of {policy} and who drafts."
        )
        return svg(figure, f"run-{scenario.name}", alt)


def _lines(policy: str) -> list[tuple[str, str, str]]:
    """Return whose goodput is drawn, in which colour and style; the policy on top."""
    lines = {NONE: ("#98a1ab", "-"), BEST_STATIC: (INK, "--"), policy: (FASTER, "-")}
    return [(name, *style) for name, style in lines.items()]


def per_bucket(episodes: Sequence[Episode], over: str, under: str, window: int) -> Array:
    """Return [buckets], a smoothed ratio of two columns over all seeds; nan where none ran."""
    above, below = _smooth(episodes, over, window), _smooth(episodes, under, window)
    above, below = (a.sum(1) if a.ndim > 1 else a for a in (above, below))
    ratio: Array = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
    return ratio


def _smooth(episodes: Sequence[Episode], column: str, window: int) -> Array:
    """Return a column summed over seeds and over a window of buckets."""
    total: Array = np.sum([getattr(e, column) for e in episodes], axis=0)
    smooth: Array = np.apply_along_axis(np.convolve, 0, total, np.ones(window), mode="same")
    return smooth


def _goodput_axis(axes: Axes, values: Array, changing: bool) -> None:
    known = values[np.isfinite(values) & (values > 0)]
    log = bool(changing and len(known) and known.max() > _LOG_FROM * known.min())
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.08 * known.max() if len(known) else 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    title(axes, "goodput, tokens per second" + " (log scale)" * log)


def _shares(axes: Axes, x: Array, own: Sequence[Episode], window: int) -> None:
    rows = _smooth(own, "bucket_rows", window)
    total = rows.sum(1, keepdims=True)
    share = np.divide(rows, total, out=np.zeros_like(rows), where=total > 0)
    used = [p for p in Proposer if rows[:, p].any()] or [Proposer.NONE]
    axes.stackplot(
        x,
        [share[:, p] for p in used],
        colors=[PROPOSER_COLOURS[p] for p in used],
        labels=[p.name.lower().replace("_", " ").replace("ngram", "n-gram") for p in used],
    )
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(MultipleLocator(0.5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def stage_starts(scenario: Scenario, steps: int) -> list[tuple[int, Stage]]:
    """Return the measured steps at which stages begin, of a run made as short as `steps`."""
    short = scenario.shortened(steps)
    found: list[tuple[int, Stage]] = []
    for step in range(steps):
        stage = short.stage_at(short.warm_up_steps + step)
        if not found or found[-1][1] is not stage:
            found.append((step, stage))
    return found


def _stages(panels: Sequence[Axes], starts: Sequence[tuple[int, Stage]], steps: int) -> None:
    """Mark where the load changes, and what it changes to where there is room to say so."""
    ends = [*(at for at, _ in starts[1:]), steps]
    for (at, stage), end in zip(starts, ends, strict=True) if len(starts) > 1 else ():
        for axes in panels:
            axes.axvline(at, color=MUTED, linewidth=0.6)
        load = str(stage.concurrency or "open loop")
        name = f"{load} {'+'.join(stage.mix)}" if len(stage.mix) < 3 else load
        if len(name) <= LETTERS * (end - at) / steps:
            panels[0].annotate(
                name,
                (at, 0),
                (3, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=7.5,
                color=MUTED,
            )
