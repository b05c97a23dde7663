"""`parlay log`: look into a decision log, sum it up, hand it to other tools; all as a stream."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from parlay.controller.log import IDLE_S, is_written
from parlay.controller.log_stats import as_json, stats_of
from parlay.policies.decision_log import LogReader, LogSettings, log_files
from parlay.policies.files import check_writable, write_json, write_whole
from parlay.policies.log_schema import COLUMNS, Columns, LoggedStep, rows_of
from parlay.policies.types import Array, Plan, PlanSource, Proposer

LogPath = Annotated[Path, typer.Argument(help="A log's folder, or one file of it.")]
_HEAD = (
    *("step", "engine", "request", "policy", "from", "planned", "probability", "fitted"),
    *("drafted", "verified", "accepted", "emitted", "step ms"),
)
_WORDS = {"engine", "policy", "from", "planned", "fitted", "proposer"}
_POLICY = {
    "steps": "{:,}",
    "rows": "{:,}",
    "tokens_per_s": "{:,.0f}",
    "step_ms": "{:.2f}",
    "emitted_per_row": "{:.2f}",
    "drafting": "{:.0%}",
    "mean_k": "{:.2f}",
    "accepted": "{:.0%}",
    "known": "{:.0%}",
    "drawn": "{:.0%}",
}
_PROPOSER = {"rows": "{:,}", "mean_k": "{:.2f}", "verified_k": "{:.2f}", "accepted": "{:.0%}"}


def log_head(
    log: LogPath, n: Annotated[int, typer.Option("-n", min=1, help="Rows to show.")] = 10
) -> None:
    """Show the first rows of a decision log."""
    table = _table(_HEAD)
    for step in _read(log):
        for row in range(min(len(step.view), n - table.row_count)):
            table.add_row(*_head_row(step, row))
        if table.row_count >= n:
            break
    _show(table)


def log_stats(
    log: LogPath,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Sum a decision log up, by policy version and by proposer."""
    if json_path is not None:
        check_writable(json_path)
    found = as_json(stats_of(_read(log)))
    engines, sources = found["steps_by_engine"], found["rows_by_plan_source"]
    typer.echo(
        f"{found['steps']:,} steps of {len(engines)} engine{'s' * (len(engines) != 1)},"
        f" {found['rows']:,} rows ({found['prompt_rows']:,} of prompts);"
        f" {found['requests_ended']:,} requests ended"
    )
    typer.echo(f"rows by plan: {', '.join(f'{n:,} {name}' for name, n in sources.items())}\n")
    for title, formats in (("policies", _POLICY), ("proposers", _PROPOSER)):
        table = _table((title.replace("ies", "y").rstrip("s"), *formats))
        for name, figures in found[title].items():
            shown = (_shown(figures[key], how) for key, how in formats.items())
            table.add_row(name, *shown)
        if table.row_count:
            _show(table)
    if json_path is not None:
        write_json(json_path, found)


def log_export(
    log: LogPath, out: Annotated[Path, typer.Argument(help="The .csv or .jsonl file to write.")]
) -> None:
    """Write a decision log as CSV or as one JSON object a line.

    Columns and units are those of the log. A list is one field of JSON in CSV; nan and infinity are
    empty in CSV and null in JSON.
    """
    writers = {".csv": _write_csv, ".jsonl": _write_jsonl}
    if out.suffix not in writers:
        raise ValueError(f"cannot write {out}: name it .csv or .jsonl")
    check_writable(out)
    rows = write_whole(out, lambda file: writers[out.suffix](file, _read(log)))
    typer.echo(f"{rows:,} rows in {out}")


def columns_of(step: LoggedStep) -> Columns:
    """Return the rows that a step read back was written as; undoes `steps_of`."""
    view, fit, follows = step.view, step.fit, step.fit.follows
    plan = Plan(
        request_id=view.request_id[follows],
        proposer=step.planned_proposer[follows],
        k=step.planned_k[follows],
        shadow=fit.shadow[follows],
        propensity=fit.propensity[follows],
        reason=fit.reason[follows],
        policy_version=step.policy_version,
        state_version=step.state_version,
    )
    columns = rows_of(view, fit, plan, step.outcome, step.engine)
    columns["rows_in_step"] = np.full(len(view), step.rows_in_step, np.int32)
    return columns


def _read(log: Path) -> LogReader:
    """Return a log's reader; raises ValueError where it is still to be written."""
    if log.is_dir() and not log_files(log) and is_written(log):
        soon = LogSettings()
        raise ValueError(
            f"{log} holds no decision log yet: the parlay serve that runs writes its first file"
            f" {IDLE_S:.0f} s after the last step, {soon.file_age_s:.0f} s after the first, at"
            f" {soon.file_bytes >> 20} MiB of rows, or when it ends"
        )
    return LogReader(log)


def _head_row(step: LoggedStep, row: int) -> list[str]:
    outcome, propensity = step.outcome, float(step.fit.propensity[row])
    counts = (outcome.drafted_k, outcome.verified_k, outcome.accepted, outcome.emitted)
    return [
        str(outcome.step_id),
        step.engine,
        str(step.view.request_id[row]),
        step.policy_version or "unknown",
        PlanSource(outcome.plan_source[row]).name.lower(),
        _choice(step.planned_proposer[row], step.planned_k[row]),
        f"{propensity:.3g}" if propensity == propensity else "unknown",
        _choice(step.fit.proposer[row], step.fit.k[row]),
        *(str(count[row]) for count in counts),
        f"{outcome.step_ms:.2f}",
    ]


def _choice(proposer: int, k: int) -> str:
    return f"{Proposer(proposer).name.lower()} {k}" if k else "none"


def _table(names: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        words = name in _WORDS
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    return table


def _show(table: Table) -> None:
    """Print a table as wide as it is: a figure that is cut off is worse than a long line."""
    console = Console()
    natural = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.width = max(console.width, natural)
    console.print(table)
    console.print()


def _shown(value: float | None, how: str) -> str:
    return "-" if value is None else how.format(value)


def _write_csv(file: IO[str], steps: LogReader) -> int:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.name for column in COLUMNS])
    rows = 0
    for values in _plain_rows(steps):
        writer.writerow([json.dumps(v) if isinstance(v, list) else v for v in values])
        rows += 1
    return rows


def _write_jsonl(file: IO[str], steps: LogReader) -> int:
    rows, names = 0, [column.name for column in COLUMNS]
    for values in _plain_rows(steps):
        file.write(json.dumps(dict(zip(names, values, strict=True)), allow_nan=False) + "\n")
        rows += 1
    return rows


def _plain_rows(steps: LogReader) -> Iterator[tuple[Any, ...]]:
    """Yield each row as plain values in the order of COLUMNS; None stands for nan and infinity."""
    for step in steps:
        columns, plain = columns_of(step), []
        for column in COLUMNS:
            values = _plain(columns[column.name])
            if column.count:
                ends = np.cumsum(columns[column.count]).tolist()
                values = [values[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
            plain.append(values)
        yield from zip(*plain, strict=True)


def _plain(values: Array) -> list[Any]:
    if values.dtype == np.float32:
        # By way of the shortest text: 0.3 is not to become 0.30000001192092896.
        values = values.astype("U").astype(float)
    if values.dtype.kind == "f":
        return [v if math.isfinite(v) else None for v in values.tolist()]
    return list(values.tolist())
