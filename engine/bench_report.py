"""`parlay bench engine`: what was found, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from parlay.engine import bench
from parlay.engine.bench_hf import HF
from parlay.engine.bench_lane import PARLAY
from parlay.engine.bench_load import Answer, Entrant, row_of
from parlay.engine.demo.stats import ADAPTIVE, NONE

Json = dict[str, Any]
_LEFT = ("engine", "mode", "set to")


def rows_of(
    entrants: Sequence[Entrant], answers: Mapping[tuple[int, int], Sequence[Answer]]
) -> list[Json]:
    """Return a row for each entrant and concurrency, ordered by concurrency."""
    keys = sorted(answers, key=lambda key: (key[1], key[0]))
    return [row_of(entrants[i], c, answers[i, c]) for i, c in keys]


def ratio_to_hf(rows: Sequence[Json]) -> dict[str, float]:
    """Return our modes' speed over Hugging Face's generate, one request at a time; {} without."""
    alone = [r for r in rows if r["concurrency"] == 1]
    plain = [r["tokens_per_s"] for r in alone if r["engine"] == HF]
    return {r["mode"]: r["tokens_per_s"] / s for s in plain for r in alone if r["engine"] == PARLAY}


def against_best(rows: Sequence[Json], peers_only: bool) -> dict[str, Json]:
    """Return by concurrency adaptive's speed over the fastest other row's: median over rounds.

    peers_only: our other modes do not count. A concurrency without another row is left out.
    """
    found: dict[str, Json] = {}
    for ours in (r for r in rows if (r["engine"], r["mode"]) == (PARLAY, ADAPTIVE)):
        others = [
            r
            for r in rows
            if r["concurrency"] == ours["concurrency"]
            and r is not ours
            and not (peers_only and r["engine"] == PARLAY)
        ]
        if not others:
            continue
        best = max(others, key=lambda r: float(r["tokens_per_s"]))
        key = "tokens_per_s_by_round"
        ratios = [a / b for a, b in zip(ours[key], best[key], strict=True)]
        found[str(ours["concurrency"])] = {
            "engine": best["engine"],
            "mode": best["mode"],
            "ratio": median(ratios),
            "ratio_by_round": ratios,
        }
    return found


def print_report(report: Json, console: Console) -> None:
    """Print the rows as a table, and a line for each other figure."""
    console.print(_table(report["rows"]))
    for line in findings(report):
        console.print(line, highlight=False)


def _table(rows: Sequence[Json]) -> Table:
    table = Table(title="the demo's mixed prompts, greedy, one thread")
    names = ("at once", *_LEFT, "tokens/s", "first token ms", "ms a token", "peak MB")
    for name in names:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for before, r in zip([None, *rows], rows, strict=False):
        if before is not None and before["concurrency"] != r["concurrency"]:
            table.add_section()
        table.add_row(
            str(r["concurrency"]),
            r["engine"],
            r["mode"],
            r["setting"],
            f"{r['tokens_per_s']:.1f}",
            f"{r['ttft_ms']:.0f}",
            "" if r["tpot_ms"] is None else f"{r['tpot_ms']:.1f}",
            "" if r["peak_memory_mb"] is None else f"{r['peak_memory_mb']:.0f}",
        )
    return table


def findings(report: Json) -> list[str]:
    """Return what the figures say, a line each."""
    lines = [
        f"adaptive at {c} at once: {found['ratio']:.2f}x {what}, {found['engine']} {found['mode']}"
        for key, what in (
            ("adaptive_to_best_peer", "the best peer"),
            ("adaptive_to_best", "the best of all others"),
        )
        for c, found in report[key].items()
    ]
    if report["ratio_to_hf"]:
        plain = report["ratio_to_hf"][NONE]
        lines.append(f"plain decoding is {plain:.2f}x Hugging Face's generate, one at a time")
    for mode, by_batch in report["overhead_ms"].items():
        text = ", ".join(
            f"{ms['engine']:.2f} ms and {ms['policy']:.2f} ms of deciding at {batch} at once"
            for batch, ms in by_batch.items()
        )
        lines.append(f"a step beside the models' passes and sampling, {mode}: {text}")
    floor, widths = report["floor"], report["verify_width"]
    lines.append(
        f"reading {floor['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{floor['read_bytes_per_s'] / 1e9:.1f} GB/s ({floor['how']}) takes "
        f"{floor['step_ms']:.1f} ms, the floor of a step"
    )
    steps = ", ".join(f"{w} tokens {v['ms']:.1f} ms ({v['ratio']:.2f}x)" for w, v in widths.items())
    lines.append(f"a verify pass at batch 1, context {bench.VERIFY_CONTEXT}: {steps}")
    lines.append(
        f"{report['rounds']} rounds of about {report['output_tokens']} tokens a request; "
        "best_static and gate were chosen for each load in a pass of their own"
    )
    return lines
