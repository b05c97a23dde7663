"""The simulator's HTML report: one file that needs nothing else, no script and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from parlay.sim.report_rank import Ranked, asked, loses, oracle, rank, reference
from parlay.sim.rows import BEST_STATIC, Row
from parlay.sim.scenario import Scenario
from parlay.sim.tally import Episode

TEMPLATE = Path(__file__).parent / "data" / "report.html.j2"
DASH = "\u2013"

COLUMNS: Sequence[tuple[str, str, str, str]] = (
    ("goodput", "goodput", "tokens/s", "{:,.0f}"),
    ("ratio_to_none", "goodput over that of", "none", "{:.3f}"),
    ("ci95", "goodput over that of", "95% interval", "{:.3f}"),
    ("ratio_to_best_static", "goodput over that of", "best static", "{:.3f}"),
    ("ratio_to_best_ngram_gate", "goodput over that of", "best n-gram gate", "{:.3f}"),
    ("ratio_to_best_published", "goodput over that of", "best published", "{:.3f}"),
    ("published_ci95", "goodput over that of", "its 95% interval", "{:.3f}"),
    ("share_of_hazard_oracle", "share of an oracle's", "hazard", "{:.3f}"),
    ("share_of_filtering_oracle", "share of an oracle's", "filtering", "{:.3f}"),
    ("mean_k", "drafts", "mean k", "{:.2f}"),
    ("drafting", "drafts", "% of time", "{:.1%}"),
    ("catching_up", "drafts", "catching up", "{:.1%}"),
    ("trying", "drafts", "tries", "{:.1%}"),
    ("slo_kept", "requests", "SLO kept", "{:.0%}"),
    ("tpot_p50_ms", "TPOT, ms", "p50", "{:.2f}"),
    ("tpot_p99_ms", "TPOT, ms", "p99", "{:.2f}"),
    ("ttft_p50_s", "TTFT, s", "p50", "{:.3f}"),
    ("ttft_p99_s", "TTFT, s", "p99", "{:.3f}"),
)
"""Field of Row, group, heading and format of each column after the policy's."""
_RATIOS = {"ratio_to_none", "ratio_to_best_static", "ratio_to_best_ngram_gate"}


@dataclass(slots=True, frozen=True)
class Result:
    """What `judge` found in one scenario; episodes: one a seed, by policy."""

    scenario: Scenario
    rows: list[Row]
    episodes: Mapping[str, list[Episode]]


def write_report(folder: Path, results: Sequence[Result]) -> Path:
    """Write folder/index.html whole or not at all, and return its path.

    Raises ValueError in one line where there are no results or the folder cannot be written.
    """
    if not results or not all(result.rows for result in results):
        raise ValueError("nothing to report: give at least one scenario, each with its rows")
    page = _page(results)
    path = folder / "index.html"
    part = folder / "index.html.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(page, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"cannot write the report into {folder}: {why}") from None
    return path


def _page(results: Sequence[Result]) -> str:
    # matplotlib is slow to import, and only wanted here.
    from parlay.sim.report_heat_map import heat_map

    ranked = rank([row for result in results for row in result.rows])
    names = [result.scenario.name for result in results]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        headline=headline(ranked, len(results)),
        size=_size(results),
        heat_map=heat_map(ranked, names),
        groups=_groups(),
        headings=[heading for _, _, heading, _ in COLUMNS],
        scenarios=[_section(result) for result in results],
    )


def _section(result: Result) -> dict[str, Any]:
    """Return what the template shows of one scenario."""
    from parlay.sim.report_dots import dots
    from parlay.sim.report_run import over_run

    scenario, rows = result.scenario, result.rows
    best = best_policy(rows)
    drawn = bool(result.episodes.get(best))
    ordered = sorted(rows, key=lambda row: -row.goodput if math.isfinite(row.goodput) else 1.0)
    apart = [[r for r in ordered if not oracle(r.policy)], [r for r in ordered if oracle(r.policy)]]
    return {
        "name": scenario.name,
        "title": scenario.title,
        "best": best,
        "verdict": _verdict(rows, best),
        "dots": dots(scenario.name, rows),
        "over_run": over_run(scenario, result.episodes, best) if drawn else None,
        "bodies": [[_line(row, row.policy == best) for row in body] for body in apart if body],
    }


def best_policy(rows: Sequence[Row]) -> str:
    """Return the asked policy with the most goodput; a reference where none was asked."""
    known = [row for row in rows if math.isfinite(row.goodput)] or rows
    real = [row for row in known if not oracle(row.policy)] or known
    return max([row for row in real if asked(row.policy)] or real, key=lambda r: r.goodput).policy


def headline(ranked: Sequence[Ranked], scenarios: int) -> str:
    """Return the report's finding in one or two sentences."""
    known = [r for r in ranked if math.isfinite(r.mean)]
    best = next((r for r in known if asked(r.policy)), None)
    if best is None:
        some = any(asked(r.policy) for r in ranked)
        return f"No policy was {'measured in every scenario' if some else 'asked for'}."
    over = f"over {scenarios} scenarios (geometric mean)" if scenarios > 1 else "in one scenario"
    said = f"Best of the policies asked for: {best.policy}, with {best.mean:.2f} times the goodput "
    said += f"of no speculation {over}"
    static = next((r.mean for r in known if r.policy == BEST_STATIC), None)
    said += f"; the best static reached {static:.2f}. " if static else ". "
    slow = [f"{name} ({ratio:.2f})" for name, ratio in best.ratios.items() if loses(ratio)]
    return said + (f"It was slower than none in {', '.join(slow)}." if slow else "It was nowhere "
                   "slower than none.")  # fmt: skip


def _verdict(rows: Sequence[Row], best: str) -> str:
    row = next(row for row in rows if row.policy == best)
    if not math.isfinite(row.ratio_to_none):
        return f"Nothing is known of {best} against no speculation."
    parts = [f"{row.ratio_to_none:.2f} times none"]
    if math.isfinite(row.ratio_to_best_static) and best != BEST_STATIC:
        parts.append(f"{row.ratio_to_best_static:.2f} times the best static")
    if math.isfinite(row.share_of_hazard_oracle):
        parts.append(f"{row.share_of_hazard_oracle:.2f} of the hazard oracle")
    whose = "policies asked for" if asked(best) else "references"
    return f"Best of the {whose}: {best}, with {', '.join(parts)}."


def _size(results: Sequence[Result]) -> str:
    """Return how much was run."""
    policies = {row.policy for result in results for row in result.rows}
    seeds = {len(own) for result in results for own in result.episodes.values()}
    said = [
        _count(len(results), "scenario"),
        f"{len(policies)} policies (references and oracles among them)",
    ]
    if seeds:
        said.append(_count(max(seeds), "paired seed"))
    return ", ".join(said)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _groups() -> list[tuple[str, int]]:
    """Return the heads of neighbouring columns, and over how many columns each stands."""
    found: dict[str, int] = {}
    for _, group, _, _ in COLUMNS:
        found[group] = found.get(group, 0) + 1
    return list(found.items())


def _line(row: Row, best: bool) -> dict[str, Any]:
    cells = []
    for field, _, _, form in COLUMNS:
        value = getattr(row, field)
        slower = field in _RATIOS and loses(value)
        cells.append({"text": cell(value, form), "slower": slower})
    kind = "best" if best else "oracle" if oracle(row.policy) else ""
    return {
        "policy": row.policy,
        "what": row.what,
        "kind": f"{kind} reference" if reference(row.policy) else kind,
        "cells": cells,
    }


def cell(value: float | tuple[float, float], form: str) -> str:
    """Return a number as the table shows it, an interval as two; a dash where it is unknown."""
    if isinstance(value, tuple):
        low, high = (cell(end, form) for end in value)
        return DASH if DASH in (low, high) else f"{low} to {high}"
    return form.format(value) if math.isfinite(value) else DASH
