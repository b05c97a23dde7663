"""`parlay simulate`: policies on scenarios, without a model and without a GPU."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from parlay.policies import DEFAULT_POLICY
from parlay.policies.files import check_writable, write_json
from parlay.policies.policy import registry
from parlay.sim.bar import Bar
from parlay.sim.costs import load_costs
from parlay.sim.counterfactual import read_traces
from parlay.sim.decompose import Part
from parlay.sim.decompose import decompose as taken_apart
from parlay.sim.laws import is_fitted
from parlay.sim.load import check_trace
from parlay.sim.report import Result, write_report
from parlay.sim.rows import Row, Slo, as_json
from parlay.sim.scenario import Scenario, named_scenarios
from parlay.sim.simulate import ORACLES, judge, maker

QUICK_SHARE = 4
"""`--quick` runs a quarter of the steps."""
QUICK_SEEDS, SEEDS = 1, 3
_COLUMNS = (
    TextColumn("{task.description:32}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
)


def simulate(
    scenario: Annotated[
        str, typer.Option(help="A name, names with commas, 'all', or a .toml file.")
    ] = "mixed",
    policy: Annotated[
        str, typer.Option(help="Names with commas, name:key=value/key=value, or 'all'.")
    ] = DEFAULT_POLICY,
    seeds: Annotated[int, typer.Option(min=1, help="Paired seeds (--quick: one).")] = SEEDS,
    steps: Annotated[
        int | None, typer.Option(min=20, help="Measured steps instead of its own.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="One seed and a quarter of the steps.")] = False,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Requests at once instead of the scenario's.")
    ] = 0,
    costs: Annotated[str, typer.Option(help="A cost model's name or a profile's path.")] = "",
    trace: Annotated[
        str, typer.Option(help="Requests' lengths and times from this trace, built in or a file.")
    ] = "",
    acceptance: Annotated[
        str, typer.Option(help="Replay a counterfactual trace, or take fitted tasks (.json).")
    ] = "",
    slo_ttft_s: Annotated[
        float, typer.Option(min=0.0, help="Promised first token (0: what 9 in 10 get of none).")
    ] = 0.0,
    slo_tpot_ms: Annotated[
        float, typer.Option(min=0.0, help="Promised ms a further token (0: likewise).")
    ] = 0.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report in here.")] = None,
    decompose: Annotated[
        bool, typer.Option(help="Also say which parts of pilot lose what against the oracle.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes (0: one a core).")] = 0,
) -> None:
    """Run policies on scenarios against no speculation, tuned statics and oracles."""
    policies = _policies(policy)
    chosen = [
        _changed(one, concurrency, costs, trace, acceptance) for one in named_scenarios(scenario)
    ]
    _check_outputs(json_path, report)
    console, results, parts = Console(), list[Result](), list[Part]()
    at_once, slo = workers or os.cpu_count() or 1, Slo(slo_ttft_s, slo_tpot_ms)
    with Bar(console, *_COLUMNS) as bar:
        for one in chosen:
            count = steps or (max(one.steps // QUICK_SHARE, 20) if quick else one.steps)
            seeded = range(1, 1 + (QUICK_SEEDS if quick else seeds))
            results.append(_judged(one, policies, seeded, count, at_once, slo, bar))
            bar.print(_table(one, results[-1].rows))
            if decompose:
                parts += (found := _taken_apart(one, seeded, count, at_once, bar))
                bar.print(_parts_table(one, found))
    every = [row for result in results for row in result.rows]
    if json_path is not None:
        more = {"parts": [dataclasses.asdict(part) for part in parts]} if decompose else {}
        write_json(json_path, {**as_json(every), **more})
    if report is not None:
        console.print(f"report: {write_report(report, results)}")


def _check_outputs(json_path: Path | None, report: Path | None) -> None:
    """Refuse what could not be written in the end; a report is a folder that may be there."""
    page = report / "index.html" if report is not None and report.is_dir() else report
    for path in (json_path, page):
        if path is not None:
            check_writable(path)


def _judged(
    scenario: Scenario,
    policies: list[str],
    seeds: range,
    steps: int,
    workers: int,
    slo: Slo,
    bar: Bar,
) -> Result:
    """Judge the policies on one scenario under a line of the bar."""
    line = bar.add(f"{scenario.name}: tuning the statics")
    rows, episodes = judge(
        scenario,
        policies,
        seeds,
        steps,
        workers,
        started=lambda total: bar.update(line, scenario.name, total),
        done=lambda _: bar.update(line, advance=1),
        slo=slo,
    )
    return Result(scenario, rows, episodes)


def _taken_apart(
    scenario: Scenario, seeds: range, steps: int, workers: int, bar: Bar
) -> list[Part]:
    """Take pilot apart on one scenario under a line of the bar."""
    line = bar.add(f"{scenario.name}: pilot's parts")
    return taken_apart(
        scenario,
        seeds,
        steps,
        workers,
        started=lambda total: bar.update(line, f"{scenario.name}: pilot's parts", total),
        done=lambda _: bar.update(line, advance=1),
    )


def _parts_table(scenario: Scenario, parts: list[Part]) -> Table:
    table = Table(
        title=f"{scenario.name}: what pilot would gain without each fault",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("part", no_wrap=True)
    for name in ("gain %", "95% interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        gain, low, high = (f"{100.0 * (x - 1.0):+.1f}" for x in (part.ratio, *part.ci95))
        table.add_row(part.part, gain, f"{low} to {high}")
    return table


def _policies(text: str) -> list[str]:
    names = [*sorted(registry())] if text == "all" else [t for t in text.split(",") if t]
    if not names:
        raise ValueError("name at least one policy, or 'all'")
    for name in names:
        maker(name)
    return [name for name in names if name not in ORACLES and name != "none"]


def _changed(
    scenario: Scenario, concurrency: int, costs: str, trace: str, acceptance: str
) -> Scenario:
    """Return the scenario with the load, the costs and the files that were asked for."""
    if trace and acceptance and not is_fitted(acceptance):
        raise ValueError("give --trace or --acceptance, not both: a recording has its own lengths")
    if trace:
        check_trace(trace)
        # A closed loop takes the trace's lengths, an open one its times too.
        if scenario.arrivals:
            named = {**scenario.arrivals, "trace": trace}
            scenario = dataclasses.replace(scenario, arrivals=named)
        else:
            scenario = dataclasses.replace(scenario, lengths={"trace": trace})
    if concurrency:
        stages = tuple(dataclasses.replace(s, concurrency=concurrency) for s in scenario.stages)
        scenario = dataclasses.replace(scenario, stages=stages, arrivals={})
    if acceptance:
        scenario = _with_acceptance(scenario, acceptance)
    if costs:
        scenario = dataclasses.replace(scenario, costs=costs)
    load_costs(scenario.costs)
    return scenario


def _with_acceptance(scenario: Scenario, path: str) -> Scenario:
    """Return the scenario with a recording to replay, or with a file's fitted tasks."""
    if is_fitted(path):
        return scenario.fitted(path)
    next(read_traces(Path(path)))
    if scenario.arrivals:
        raise ValueError(f"{scenario.name} is an open loop; a recording needs a closed one")
    return dataclasses.replace(scenario, acceptance=path, lengths={})


def _table(scenario: Scenario, rows: list[Row]) -> Table:
    """Return what fits 80 columns; the rest is in the JSON and the report."""
    tuned = "; ".join(f"{row.policy} is {row.what}" for row in rows if row.what)
    table = Table(
        title=f"{scenario.name}: {scenario.title}",
        title_justify="left",
        caption=tuned,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True, max_width=24)
    for name in ("tokens/s", "x none", "x static", "x gate", "of filter", "mean k"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row.goodput):
        half = 0.5 * (row.ci95[1] - row.ci95[0])
        table.add_row(
            row.policy,
            f"{row.goodput:,.0f}",
            f"{row.ratio_to_none:.2f} \u00b1{half:.2f}",
            _digits(row.ratio_to_best_static),
            _digits(row.ratio_to_best_ngram_gate),
            _digits(row.share_of_filtering_oracle),
            f"{row.mean_k:.1f}",
        )
    return table


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio == ratio else "-"
