"""`parlay lab`: a policy on the default model's recorded answers against what it has to beat.

Every recorded request is answered once or some times, from a cold start to the last token, on
paired seeds. Two sets: `mixed`, the recording as it is, against the n-gram gate that was tuned for
the very batch and cost model; and `hostile`, where no draft ever holds, against no speculation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from parlay.policies.files import check_writable, write_json
from parlay.sim.costs import load_costs
from parlay.sim.counterfactual import SHIPPED_TRACE, TracedRequest, read_traces, write_traces
from parlay.sim.episode import run_episode
from parlay.sim.load import first_line
from parlay.sim.scenario import Scenario, Stage
from parlay.sim.simulate import maker, tune
from parlay.sim.workload import Arrival

MIXED, HOSTILE = "mixed", "hostile"
PASSES = {1: 1, 4: 1, 16: 2, 64: 4}
"""By batch: how often every request is answered, so that there are some hundred steps."""
GATES = [
    f"ngram_gate:min_match={m}/k_ngram={n}/k_draft={d}"
    for m in (1, 2, 4, 6)
    for n in (3, 5, 8)
    for d in (0, 1, 2, 4)
]
_SAMPLE = 2000
_ONE_SIDED = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13}
"""Student's t at 95%, one-sided, by number of seeds."""


@dataclass(slots=True, frozen=True)
class Cell:
    """One policy at one batch: goodput over that of `against`, and its lower 95% bound."""

    requests: str
    costs: str
    batch: int
    policy: str
    against: str
    ratio: float
    low: float


def recording(name: str) -> list[TracedRequest]:
    """Return the shipped requests as they are, or "hostile": with drafts that never hold."""
    whole = list(read_traces(SHIPPED_TRACE))
    if name == MIXED:
        return whole
    return [
        dataclasses.replace(r, accepted={p: np.zeros_like(a) for p, a in r.accepted.items()})
        for r in whole
    ]


def scenario_of(path: str, batch: int, costs: str, waiting: bool) -> Scenario:
    """Return a replay at a batch; waiting: requests queue, to be answered once and for all."""
    stages = (Stage({"chat": 1.0}, 0 if waiting else batch),)
    # An engine runs at most eight times an open loop's mean.
    arrivals = {"mean_concurrency": batch / 8} if waiting else {}
    return Scenario(
        "lab", "", costs, stages, 600, 0, catches_up=True, acceptance=path, arrivals=arrivals
    )


def seconds(
    requests: Sequence[TracedRequest],
    path: str,
    batch: int,
    costs: str,
    policy: str,
    seeds: Sequence[int],
) -> np.ndarray:
    """Return how long each seed's engine takes to answer every request, f64 [seeds]."""
    one, count = scenario_of(path, batch, costs, waiting=True), PASSES[batch] * len(requests)

    def arrivals(_: Stage, seed: int) -> Iterator[Arrival]:
        for number, place in enumerate(itertools.count(first_line(seed))):
            r, when = requests[place % len(requests)], 0.0 if number < count else np.inf
            yield Arrival(when, r.task, r.prompt_tokens, r.output_tokens)

    def run(seed: int) -> float:
        # As many steps as make the engine serve `count` requests of this length.
        some = itertools.islice(arrivals(one.stages[0], 1000 * seed), _SAMPLE)
        mean = float(np.mean([a.output_tokens for a in some]))
        steps = round(count * mean / float(one.arrivals["mean_concurrency"]))
        found = run_episode(one, maker(policy), arrivals, seed, steps)
        assert found.tokens == PASSES[batch] * sum(r.output_tokens for r in requests)
        return found.step_s

    return np.array([run(seed) for seed in seeds])


def cells(
    policies: Sequence[str],
    sets: Sequence[str],
    costs: Sequence[str],
    batches: Sequence[int],
    seeds: int,
    told: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Run every cell; told is handed each as it is done."""
    found = []
    with tempfile.TemporaryDirectory(prefix="parlay-lab-") as folder:
        for name in sets:
            requests, path = recording(name), Path(folder) / f"{name}.jsonl"
            write_traces(path, requests)
            run = functools.partial(seconds, requests, str(path), seeds=range(1, 1 + seeds))
            for cost, batch in itertools.product(costs, batches):
                against = "none"
                if name == MIXED:
                    against = tune(scenario_of(str(path), batch, cost, False), GATES, workers=1)
                theirs = run(batch, cost, against)
                for policy in policies:
                    ratio = theirs / run(batch, cost, policy)
                    found.append(Cell(name, cost, batch, policy, against, *_bounded(ratio)))
                    told(found[-1])
    return found


def _bounded(ratio: np.ndarray) -> tuple[float, float]:
    """Return the mean of ratios [seeds], and its lower 95% bound."""
    mean, seeds = float(ratio.mean()), len(ratio)
    if seeds == 1:
        return mean, mean
    return mean, mean - _ONE_SIDED.get(seeds, 2.0) * float(ratio.std(ddof=1)) / seeds**0.5


def lab(
    policy: Annotated[str, typer.Option(help="Names with commas, as in `simulate`.")] = "pilot",
    sets: Annotated[str, typer.Option(help="mixed, hostile or both.")] = "mixed,hostile",
    costs: Annotated[str, typer.Option(help="Cost models, with commas.")] = "cpu_smollm,h200_8b",
    batch: Annotated[str, typer.Option(help="Batches of 1, 4, 16, 64.")] = "1,4,16,64",
    seeds: Annotated[int, typer.Option(min=1, help="Paired seeds.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the cells here.")] = None,
) -> None:
    """Run policies on the default model's recorded answers, cold start and all."""
    policies, names, models = (text.split(",") for text in (policy, sets, costs))
    batches = [int(b) for b in batch.split(",") if b.isdecimal()]
    if set(names) - {MIXED, HOSTILE}:
        raise ValueError(f"--sets must be of {MIXED} and {HOSTILE}, not '{sets}'")
    if not batches or set(batches) - set(PASSES) or len(batches) < len(batch.split(",")):
        raise ValueError(f"--batch must be of {', '.join(map(str, PASSES))}, not '{batch}'")
    for one in policies:
        maker(one)
    for model in models:
        load_costs(model)
    if json_path is not None:
        check_writable(json_path)
    console = Console()
    console.print("times on recorded answers; ratios above 1: the policy is faster")
    found = cells(policies, names, models, batches, seeds, lambda c: console.print(_line(c)))
    if json_path is not None:
        write_json(json_path, {"rows": [asdict(cell) for cell in found]})
    console.print(_table(found))


def _line(cell: Cell) -> str:
    where = f"{cell.requests} {cell.costs} batch {cell.batch}"
    return f"{where}: {cell.policy} {cell.ratio:.3f} (at least {cell.low:.3f}) of {cell.against}"


def _table(found: Sequence[Cell]) -> Table:
    """Return ratios, a line a policy, set and cost model, a column a batch."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    batches = list(dict.fromkeys(cell.batch for cell in found))
    for name in ("policy", "set", "costs", *(f"batch {b}" for b in batches)):
        table.add_column(name, justify="right" if name.startswith("batch") else "left")
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for cell in found:
        line = lines.setdefault((cell.policy, cell.requests, cell.costs), {})
        line[cell.batch] = f"{cell.ratio:.3f}"
    for key, line in lines.items():
        table.add_row(*key, *(line.get(b, "-") for b in batches))
    return table
