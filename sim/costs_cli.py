"""`parlay calibrate costs`: the simulator's cost models beside published end-to-end figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from parlay.policies.files import check_writable, write_json
from parlay.sim.compare_costs import Row, compare

_CLOSE = 0.1


def calibrate_costs(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table here.")] = None,
) -> None:
    """Print what the cost models say beside what others measured, and by how much they differ."""
    if json_path is not None:
        check_writable(json_path)
    rows = compare()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("source", no_wrap=True)
    table.add_column("setting", no_wrap=True)
    for name in ("published", "ours", "error"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in rows:
        figures = f"{row.published:,.2f}", f"{row.ours:,.2f}", f"{row.error:+.1%}"
        table.add_row(row.source, row.setting, *figures, "fitted" if row.fitted else "")
    console = Console()
    console.print(table)
    console.print(_summary(rows))
    if json_path is not None:
        found = [{**dataclasses.asdict(row), "error": row.error} for row in rows]
        write_json(json_path, {"rows": found})


def _summary(rows: list[Row]) -> str:
    """Say how many held-out points are met, by source."""
    said = []
    for source in dict.fromkeys(row.source for row in rows):
        held_out = [row for row in rows if row.source == source and not row.fitted]
        close = sum(abs(row.error) <= _CLOSE for row in held_out)
        said.append(f"{source} {close} of {len(held_out)}")
    reasons = "; why others differ: sim/compare_costs.py"
    return f"held-out points within {_CLOSE:.0%}: {', '.join(said)}{reasons}"
