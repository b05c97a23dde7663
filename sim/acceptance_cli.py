"""`parlay calibrate acceptance`: how tasks accept, fitted from logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from parlay.policies.files import check_writable, write_json
from parlay.policies.types import NGRAM, Array, Proposer
from parlay.sim.acceptance_check import SIMULATIONS, Goodness, goodness
from parlay.sim.acceptance_fit import fit, law_of
from parlay.sim.acceptance_log import Observed, read_logs
from parlay.sim.laws import SUFFIX, Task, tasks, write_fitted

_LENGTHS_OF = "chat"
"""Whose lengths a task gets where the log has none."""
_NARROWEST = 0.05


@dataclass(slots=True, frozen=True)
class Fit:
    """One fitted task, what it was fitted to, and how well it says that."""

    task: Task
    texts: int
    drafts: int
    checks: list[Goodness]


def calibrate_acceptance(
    logs: Annotated[list[Path], typer.Argument(help="Decision logs, or Spec-Bench .jsonl files.")],
    out: Annotated[Path, typer.Option(help="The fitted file to write, .json.")],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the goodness of fit here.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a plot a task in here.")] = None,
) -> None:
    """Fit how tasks accept, for `parlay simulate --acceptance FILE`, and say how well it fits."""
    if out.suffix != SUFFIX:
        raise ValueError(f"name the fitted file {out.stem}{SUFFIX}: so it is told from a trace")
    for path in (out, json_path):
        if path is not None:
            check_writable(path)
    reading = read_logs(logs)
    for note in reading.notes:
        typer.echo(note, err=True)
    found = fitted(reading.observed())
    write_fitted(out, {tag: one.task for tag, one in found.items()}, [path.name for path in logs])
    if json_path is not None:
        write_json(json_path, as_json(found))
    if report is not None:
        _plots(report, found)
    console, table = Console(), _table(found)
    natural = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.width = max(console.width, natural)
    console.print(table)
    typer.echo(f"{len(found)} tasks in {out}")


def fitted(observed: Mapping[str, Observed]) -> dict[str, Fit]:
    """Return the fit of every task with enough drafts; raises ValueError where none has."""
    total = sum(len(of.first) for of in observed.values())
    found, why = {}, ""
    for tag, of in observed.items():
        try:
            model = fit(of)
        except ValueError as error:
            why = f"{tag}: {error}"
            typer.echo(f"{why}; left out", err=True)
            continue
        law = law_of(model, of.matched / of.looked if of.looked else float(NGRAM in of.proposer))
        usual = tasks()[_LENGTHS_OF]
        task = Task(
            law,
            _log_normal(of.prompt_tokens, usual.prompt),
            _log_normal(of.output_tokens, usual.output),
            len(of.first) / total,
        )
        found[tag] = Fit(task, len(of.first), len(of), goodness(model, of))
    if not found:
        raise ValueError(f"no task could be fitted; {why}")
    return found


def as_json(found: Mapping[str, Fit]) -> dict[str, Any]:
    """Return the goodness of fit as `--json` writes it."""
    return {tag: _task_json(one) for tag, one in found.items()}


def _task_json(one: Fit) -> dict[str, Any]:
    law = one.task.law
    return {
        "texts": one.texts,
        "drafts": one.drafts,
        "shift_sd": law.shift_sd,
        "phase_shift": law.phase_shift,
        "cold_factor": law.cold_factor,
        "proposers": {Proposer(c.proposer).name.lower(): _check_json(c) for c in one.checks},
    }


def _check_json(check: Goodness) -> dict[str, Any]:
    there = np.flatnonzero(check.reached).tolist()
    return {
        "places": [
            {
                "place": j + 1,
                "drafts": int(check.reached[j]),
                "observed": float(check.observed[j]),
                "foretold": float(check.foretold[j]),
                "z": float(check.z[j]),
            }
            for j in there
        ],
        "runs": [
            {"held": j, "drafts": int(n), "foretold": round(float(m), 2)}
            for j, (n, m) in enumerate(zip(check.runs, check.runs_foretold, strict=True))
        ],
        "between_texts_sd": asdict(check.spread),
        "lag_1_correlation": asdict(check.memory),
    }


def _table(found: Mapping[str, Fit]) -> Table:
    table = Table(
        title="acceptance by place, logged/foretold; of the first token between and within texts",
        caption="spread: deviation between texts; memory: correlation from draft to draft;"
        f" * outside {SIMULATIONS} simulations",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("task", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("drafts", "1st", "2nd", "3rd", "most z", "spread", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for tag, one in found.items():
        for check in one.checks:
            pairs = [
                _pair(check.observed[j], check.foretold[j]) if check.reached[j] else "-"
                for j in range(3)
            ]
            drafts = f"{int(check.runs.sum()):,}"
            sides = [_pair(a.observed, a.simulated, a.inside) for a in (check.spread, check.memory)]
            name = Proposer(check.proposer).name.lower().replace("_model", "")
            table.add_row(tag, name, drafts, *pairs, f"{_largest(check.z):.1f}", *sides)
    return table


def _largest(z: Array) -> float:
    known = np.abs(z[np.isfinite(z)])
    return float(known.max()) if known.size else float("nan")


def _pair(observed: float, other: float, inside: bool = True) -> str:
    if not np.isfinite([observed, other]).all():
        return "-"
    return f"{observed:.2f}/{other:.2f}".replace("0.", ".") + ("" if inside else "*")


def _plots(folder: Path, found: Mapping[str, Fit]) -> None:
    # matplotlib is slow to import, and only wanted here.
    from parlay.sim.acceptance_plot import plot

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write plots into {folder}: {error.strerror}") from None
    for tag, one in found.items():
        plot(folder / f"acceptance-{re.sub(r'[^0-9A-Za-z_-]', '-', tag)}.svg", tag, one.checks)


def _log_normal(tokens: Array, usual: tuple[float, float]) -> tuple[float, float]:
    """Return (median, sigma) of lengths of which 0 is unknown, `usual` where all are."""
    known = np.log(tokens[tokens > 0])
    if not known.size:
        return usual
    median, sigma = float(np.exp(np.median(known))), float(known.std())
    return round(median, 1), round(max(sigma, _NARROWEST), 3)
