"""What the demo decodes: cells of task and concurrency, in a closed loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parlay.engine.demo.prompts import TASKS, DemoPrompt
from parlay.engine.demo.steps import StepLog
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.step import Engine

CONCURRENCIES = (1, 4, 16)
MIXED = "mixed"
_LENGTHS = (1.1, 0.9, 0.6, 1.4)
"""Of the mean, by a prompt's place in its task. Were all outputs of one length, plain decoding
would end a whole batch in one step, as no real load does, and never run it half empty."""


@dataclass(slots=True, frozen=True)
class Cell:
    """One task (or all of them mixed) at one concurrency; prompts: indices, in order of arrival."""

    task: str
    concurrency: int
    prompts: tuple[int, ...]

    @property
    def mixed(self) -> bool:
        """Say whether every task takes part."""
        return self.task == MIXED

    @property
    def label(self) -> str:
        """Return a name for tables."""
        return f"{self.task}@{self.concurrency}"


@dataclass(slots=True, frozen=True)
class Shape:
    """How much to run: rounds, mean tokens a request, and requests of a cell by concurrency."""

    rounds: int
    output_tokens: int
    task_requests: Mapping[int, int]
    mixed_requests: Mapping[int, int]


def output_lengths(prompts: Sequence[DemoPrompt], mean: int) -> list[int]:
    """Return how many tokens each prompt is answered with at most."""
    place = [sum(other.task == p.task for other in prompts[:i]) for i, p in enumerate(prompts)]
    return [max(1, round(mean * _LENGTHS[at % len(_LENGTHS)])) for at in place]


def cells_of(prompts: Sequence[DemoPrompt], shape: Shape) -> list[Cell]:
    """Return the cells in the order they run: by concurrency, each task, then mixed.

    Where a cell needs more requests than there are prompts they come round again: greedy requests
    share nothing, so that a repeated prompt costs what it cost before.
    """
    of_task = {t: [i for i, p in enumerate(prompts) if p.task == t] for t in TASKS}
    # One prompt of each task, then the next of each, so that any prefix of it is mixed.
    mixed = [index for turn in zip(*of_task.values(), strict=True) for index in turn]
    cells = []
    for c in CONCURRENCIES:
        cells += [Cell(t, c, _cycle(of_task[t], shape.task_requests[c])) for t in TASKS]
        cells.append(Cell(MIXED, c, _cycle(mixed, shape.mixed_requests[c])))
    return cells


def _cycle(items: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(items[i % len(items)] for i in range(count))


@dataclass(slots=True)
class CellRun:
    """What one mode did in one cell: seconds of wall time, tokens emitted, its steps, its outputs.

    outputs: (prompt, output tokens) in order of arrival.
    """

    seconds: float
    tokens: int
    steps: StepLog
    outputs: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Return emitted tokens a second, prompts' time included."""
        return self.tokens / self.seconds


def run_cell(
    engine: Engine,
    cell: Cell,
    prompts: Sequence[DemoPrompt],
    prompt_ids: Sequence[list[int]],
    lengths: Sequence[int],
) -> CellRun:
    """Decode a cell greedily in a closed loop: as one request ends the next comes in.

    lengths: of each prompt's output, at most.
    """
    sampling = [SamplingParams(max_tokens=n) for n in lengths]
    waiting = list(cell.prompts)[::-1]
    requests: list[Request] = []
    log = StepLog()
    start_s = engine.backend.clock()
    while waiting or engine.has_work:
        live = len(engine.scheduler.running) + len(engine.scheduler.waiting)
        while waiting and live < cell.concurrency:
            index = waiting.pop()
            task = SpeculationParams(task=prompts[index].task)
            requests.append(engine.add(prompt_ids[index], sampling[index], task))
            live += 1
        outcome = engine.step()
        if outcome is not None:
            log.add(outcome)
    seconds = engine.backend.clock() - start_s
    outputs = [(i, r.output) for i, r in zip(cell.prompts, requests, strict=True)]
    return CellRun(seconds, sum(len(o) for _, o in outputs), log, outputs)
