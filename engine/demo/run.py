"""Run the demo: calibrate, then rounds in which every mode decodes every cell, back to back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from parlay.engine.demo.bar import Bar
from parlay.engine.demo.budget import Costs, Plan, choose_shape, measure_costs
from parlay.engine.demo.modes import Lane
from parlay.engine.demo.prompts import DemoPrompt
from parlay.engine.demo.stats import NONE
from parlay.engine.demo.workload import (
    Cell,
    CellRun,
    Shape,
    cells_of,
    output_lengths,
    run_cell,
)


@dataclass(slots=True)
class DemoRun:
    """What was run: by round and mode a CellRun for each of `cells`, complete rounds only."""

    plan: Plan
    shape: Shape
    costs: Costs
    cells: list[Cell]
    rounds: list[dict[str, list[CellRun]]] = field(default_factory=list)
    stopped_early: bool = False


class TooSlow(ValueError):
    """Not even one round fitted before the deadline."""


def run_demo(
    lanes: Sequence[Lane],
    prompts: Sequence[DemoPrompt],
    prompt_ids: Sequence[list[int]],
    plan: Plan,
    console: Console,
    started_s: float,
) -> DemoRun:
    """Decode everything; started_s: time.monotonic() when the command began. Raises TooSlow."""
    plain = next(lane for lane in lanes if lane.mode.name == NONE)
    costs = measure_costs(plain.engine, prompts, prompt_ids)
    shape = choose_shape(plan, costs, prompts, prompt_ids, len(lanes))
    run = DemoRun(plan, shape, costs, cells_of(prompts, shape))
    console.print(describe(run, len(lanes)), highlight=False)
    stop_s = started_s + plan.deadline_s - plan.check_s
    tokens = [len(ids) for ids in prompt_ids]
    lengths = output_lengths(prompts, shape.output_tokens)
    seconds = [costs.seconds(c, tokens, lengths) for c in run.cells]
    with Bar(console, shape.rounds * len(lanes) * sum(seconds)) as bar:

        def decode(lane: Lane, index: int) -> CellRun:
            cell = run.cells[index]
            at = f"round {len(run.rounds) + 1}/{shape.rounds} {cell.label} {lane.mode.name}"
            bar.start(at)
            done = run_cell(lane.engine, cell, prompts, prompt_ids, lengths)
            bar.advance(seconds[index])
            return done

        for number in range(shape.rounds):
            finished = _round(lanes, len(run.cells), number, decode, stop_s)
            if finished is None:
                break
            run.rounds.append(finished)
    run.stopped_early = len(run.rounds) < shape.rounds
    if run.stopped_early:
        console.print(f"time is up in round {len(run.rounds) + 1}, which is left out")
    if not run.rounds:
        raise TooSlow(
            f"this machine is too slow for one round in {plan.deadline_s / 60:.0f} minutes"
        )
    return run


def _round(
    lanes: Sequence[Lane],
    cells: int,
    number: int,
    decode: Callable[[Lane, int], CellRun],
    stop_s: float,
) -> dict[str, list[CellRun]] | None:
    """Run every cell under every mode, each mode first in its turn; None: out of time."""
    runs: dict[str, list[CellRun]] = {lane.mode.name: [] for lane in lanes}
    for index in range(cells):
        first = (number + index) % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            if time.monotonic() > stop_s:
                return None
            runs[lane.mode.name].append(decode(lane, index))
    return runs


def describe(run: DemoRun, modes: int) -> str:
    """Say what was chosen and why."""
    shape, costs = run.shape, run.costs
    steps = ", ".join(f"{costs.step_ms[c]:.0f} ms at {c}" for c in sorted(costs.step_ms))
    return (
        f"a plain step takes {steps}; a prompt token {costs.prompt_token_ms:.2f} ms. So: "
        f"{shape.rounds} rounds x {modes} modes x {len(run.cells)} cells, about "
        f"{shape.output_tokens} tokens a request; at 16 a task's prompts are used several times"
    )
