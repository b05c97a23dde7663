"""`parlay train`: learn a policy in the simulator and write it as a file for `learned`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from parlay.sim.bar import Bar
from parlay.sim.export import COMPARED
from parlay.sim.scenario import named_scenarios
from parlay.sim.sweep import grid, sweep
from parlay.sim.train import Training
from parlay.sim.train import train as run


def train(
    algorithm: Annotated[str, typer.Argument(help="ppo, maskable_ppo, recurrent_ppo or dqn.")],
    out: Annotated[Path, typer.Option(help="The file to write; FILE.ckpt is kept beside it.")],
    scenario: Annotated[
        str, typer.Option(help="A name, names with commas, 'all', or a .toml file.")
    ] = "mixed",
    minutes: Annotated[float, typer.Option(help="Wall clock to train for.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    vary: Annotated[
        float, typer.Option(min=0.0, help="How much costs and acceptance differ between batches.")
    ] = 0.3,
    clone: Annotated[bool, typer.Option(help="Begin as pilot (ppo and maskable_ppo).")] = False,
    tpot_target_ms: Annotated[
        float, typer.Option(min=0.0, help="Lose reward for ms a token above this (0: none).")
    ] = 0.0,
    resume: Annotated[bool, typer.Option(help="Go on from FILE.ckpt.")] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of the learner; KEY=V1,V2 tries each."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Train so many, from --seed on, and keep the best.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Processes (0: one a core).")] = 0,
    ray: Annotated[
        str, typer.Option(help="Train on this Ray cluster; 'local': one on this machine.")
    ] = "",
) -> None:
    """Train a policy in the simulator and say how it does in the engine's loop."""
    choices = _choices(setting or [])
    task = Training(
        algorithm=algorithm,
        scenarios=tuple(named_scenarios(scenario)),
        minutes=minutes,
        seed=seed,
        out=out,
        vary=vary,
        clone=clone,
        tpot_target_ms=tpot_target_ms or float("nan"),
    )
    tasks, console = grid(task, choices, seeds), Console()
    if len(tasks) > 1 or ray:
        if resume:
            raise ValueError("a sweep does not go on where it was: leave --resume out")
        _swept(tasks, workers or os.cpu_count() or 1, ray, console)
    else:
        _one(tasks[0], resume, console)


def _one(task: Training, resume: bool, console: Console) -> None:
    """Run a training under a bar, and say how its network does."""
    with _bar(console) as bar:
        shown = bar.add("preparing", 1.0)

        def tell(share: float, row_steps: int, gain: float) -> None:
            text = f"{1e-6 * row_steps:.2f}M row-steps, {gain:.2f}x no speculation"
            bar.update(shown, text, completed=share)

        card = run(task, resume, tell)
    _show(task.out, card, console)


def _bar(console: Console) -> Bar:
    return Bar(console, TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())


def _choices(settings: list[str]) -> dict[str, list[float]]:
    """Return the values to try of each setting; raises ValueError where one is no number."""
    found: dict[str, list[float]] = {}
    for text in settings:
        name, equals, values = text.partition("=")
        try:
            found[name] = [float(value) for value in values.split(",")]
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"--set {text}: write KEY=NUMBER, or KEY=NUMBER,NUMBER to try each")
    return found


def _swept(tasks: list[Training], workers: int, ray: str, console: Console) -> None:
    """Run a sweep under a bar, and say how all did and where the best is."""
    with _bar(console) as bar:
        shown = bar.add("training", len(tasks))
        best = [0.0]

        def tell(_: int, score: float) -> None:
            best[0] = max(best[0], score)
            bar.update(shown, f"best so far {best[0]:.3f}x no speculation", advance=1)

        runs = sweep(tasks, workers, ray, done=tell)
    table = Table(title=f"{tasks[0].out}: the best of {len(runs)}")
    for column in ("run", "seed", "settings", "x none"):
        table.add_column(column, justify="left" if column == "settings" else "right")
    for one in runs:
        settings = ", ".join(f"{name}={value:g}" for name, value in one.settings.items())
        table.add_row(str(one.number), str(one.seed), settings, f"{one.score:.3f}")
    console.print(table)
    _show(tasks[0].out, runs[0].card, console)


def _show(out: Path, card: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{out}: {card['row_steps']:,} row-steps in {card['minutes']:g} minutes")
    table.add_column("scenario")
    for name in COMPARED:
        table.add_column(f"{name} tokens/s", justify="right")
    for name, scored in card["tokens_per_s"].items():
        table.add_row(name, *(f"{scored[p]:,.0f}" for p in COMPARED))
    console.print(table)
