"""`parlay train`: learn a policy in the simulator and write it as a file for `learned`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parlay.sim.scenario import named_scenarios
from parlay.sim.train import Training
from parlay.sim.train import train as run


def train(
    algorithm: Annotated[str, typer.Argument(help="ppo, maskable_ppo or dqn.")],
    out: Annotated[Path, typer.Option(help="The file to write; FILE.ckpt is kept beside it.")],
    scenario: Annotated[
        str, typer.Option(help="A name, names with commas, 'all', or a .toml file.")
    ] = "mixed",
    minutes: Annotated[float, typer.Option(help="Wall clock to train for.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    vary: Annotated[
        float, typer.Option(min=0.0, help="How much costs and acceptance differ between batches.")
    ] = 0.3,
    clone: Annotated[bool, typer.Option(help="Begin as the goodput policy (PPOs only).")] = False,
    tpot_target_ms: Annotated[
        float, typer.Option(min=0.0, help="Lose reward for ms a token above this (0: none).")
    ] = 0.0,
    resume: Annotated[bool, typer.Option(help="Go on from FILE.ckpt.")] = False,
) -> None:
    """Train a policy in the simulator and say how it does in the engine's loop."""
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
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("preparing", total=1.0)

        def tell(share: float, row_steps: int, gain: float) -> None:
            text = f"{1e-6 * row_steps:.2f}M row-steps, {gain:.2f}x no speculation"
            bar.update(shown, completed=share, description=text)

        card = run(task, resume, tell)
    table = Table(title=f"{out}: {card['row_steps']:,} row-steps in {card['minutes']:g} minutes")
    table.add_column("scenario")
    for name in ("none", "goodput", "learned"):
        table.add_column(f"{name} tokens/s", justify="right")
    for name, scored in card["tokens_per_s"].items():
        table.add_row(name, *(f"{scored[p]:,.0f}" for p in ("none", "goodput", "learned")))
    console.print(table)
