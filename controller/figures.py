"""The page's plots, as specifications for plotly.js, made from an overview."""

from __future__ import annotations

from typing import Any

from parlay.controller.overview import NAMES

INK = {"none": "#8a929c", "ngram": "#2b87d1", "draft_model": "#e2792c", "medusa": "#9563d8"}
"""A colour for each proposer; readable on white and on black."""
LABEL = {"none": "none", "ngram": "n-gram", "draft_model": "draft model", "medusa": "Medusa"}
PLAIN, GAIN = "#8a929c", "#1f9d6b"
Figure = dict[str, Any]


def figures(view: dict[str, Any]) -> dict[str, Figure]:
    """Return data and layout of each plot, by the id of the page's element that it belongs in."""
    return {
        "plot-rate": _rate(view["history"]),
        "plot-gain": _gain(view["history"]),
        "plot-load": _load(view["history"]),
        "plot-shares": _shares(view["history"]),
        "plot-acceptance": _acceptance(view["proposers"]),
        "plot-k": _k_by_task(view["tasks"]),
    }


def _times(history: dict[str, Any]) -> list[float]:
    """Return unix times in ms, which plotly.js shows as UTC."""
    return [1e3 * at_s for at_s in history["at_s"]]


def _line(history: dict[str, Any], key: str, name: str, colour: str, **more: Any) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": _times(history),
        "y": history[key],
        "line": {"color": colour, "width": 2} | more,
        "hovertemplate": "%{y:,.4~g}<extra>" + name + "</extra>",
    }


def _over_time(history: dict[str, Any], traces: list[Figure], unit: str, **yaxis: Any) -> Figure:
    times = _times(history)
    return {
        "data": traces,
        "layout": {
            "xaxis": {
                "type": "date",
                "title": {"text": "time (UTC)"},
                "range": times[:1] + times[-1:],
            },
            "yaxis": {"title": {"text": unit}} | yaxis,
            "hovermode": "x unified",
        },
    }


def _rate(history: dict[str, Any]) -> Figure:
    traces = [
        _line(history, "plain_tokens_per_s", "without speculation (estimate)", PLAIN, dash="dot"),
        _line(history, "tokens_per_s", "with parlay", GAIN),
    ]
    return _over_time(history, traces, "tokens per s of step time", rangemode="tozero")


def _gain(history: dict[str, Any]) -> Figure:
    traces = [
        _line(history, "expected_gain", "cost model", GAIN),
        _line(history, "guard_gain", "guard, measured", INK["draft_model"], shape="hv"),
    ]
    figure = _over_time(history, traces, "times no speculation", tickformat=".2f", ticksuffix="x")
    known = [v for t in traces for v in t["y"] if v is not None]
    figure["layout"]["yaxis"]["range"] = [min([0.9, *known]) - 0.05, max([1.2, *known]) + 0.05]
    line = {"color": PLAIN, "width": 1, "dash": "dot"}
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": line}
    figure["layout"]["shapes"] = [across]
    return figure


def _load(history: dict[str, Any]) -> Figure:
    traces = [
        _line(history, "running", "running", INK["ngram"]),
        _line(history, "waiting", "waiting", INK["draft_model"]),
    ]
    return _over_time(history, traces, "requests", rangemode="tozero")


def _shares(history: dict[str, Any]) -> Figure:
    """Return a stacked plot; where nobody ran there is no point, else it would be drawn as 0."""
    points = {
        name: [(x, y) for x, y in zip(_times(history), shares, strict=True) if y is not None]
        for name, shares in history["shares"].items()
    }
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": LABEL[name],
            "x": [x for x, y in points[name]],
            "y": [y for x, y in points[name]],
            "stackgroup": "all",
            "line": {"width": 0.5, "color": INK[name]},
            "fillcolor": INK[name],
            "hovertemplate": "%{y:.1%}<extra>" + LABEL[name] + "</extra>",
        }
        for name in NAMES
        if any(history["shares"].get(name) or [])
    ]
    return _over_time(history, traces, "share of rows", range=[0, 1], tickformat=".0%")


def _acceptance(proposers: list[dict[str, Any]]) -> Figure:
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": LABEL[found["proposer"]],
            "x": list(range(1, len(found["by_position"]) + 1)),
            "y": found["by_position"],
            "line": {"color": INK[found["proposer"]], "width": 2},
            "marker": {"size": 7},
            "hovertemplate": "position %{x}: %{y:.1%}<extra></extra>",
        }
        for found in proposers
    ]
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "position in the draft"}, "dtick": 1},
            "yaxis": {
                "title": {"text": "accepted, once reached"},
                "range": [0, 1.02],
                "tickformat": ".0%",
            },
        },
    }


def _k_by_task(tasks: list[dict[str, Any]]) -> Figure:
    traces = [
        {
            "type": "bar",
            "name": LABEL[name],
            "x": [task["task"] for task in tasks],
            "y": [task["k"][name] for task in tasks],
            "marker": {"color": INK[name]},
            "hovertemplate": "%{x}: %{y:.2f} tokens<extra>" + LABEL[name] + "</extra>",
        }
        for name in NAMES[1:]
        if any(task["k"][name] for task in tasks)
    ]
    return {
        "data": traces,
        "layout": {
            "barmode": "group",
            "xaxis": {"title": {"text": "task"}, "type": "category"},
            "yaxis": {"title": {"text": "k, tokens a draft"}, "rangemode": "tozero"},
        },
    }
