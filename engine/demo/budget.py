"""How much of the demo fits its time: measure plain decoding, then choose rounds and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from parlay.engine.demo.prompts import DemoPrompt
from parlay.engine.demo.workload import (
    CONCURRENCIES,
    MIXED,
    Cell,
    Shape,
    cells_of,
    output_lengths,
    run_cell,
)
from parlay.engine.step import Engine

_PROBE_TOKENS = {1: 12, 4: 8, 16: 8}


@dataclass(slots=True, frozen=True)
class Plan:
    """A kind of run: requests of a cell by concurrency, and (rounds, tokens) it wishes, best first.

    rounds_s: time for timed rounds; check_s: what the checks after them may need; deadline_s: when
    the whole command must have ended.
    """

    name: str
    task_requests: dict[int, int]
    mixed_requests: dict[int, int]
    wishes: tuple[tuple[int, int], ...]
    rounds_s: float
    check_s: float
    deadline_s: float


# Where prompts are expensive they are most of the work: the quick run has as few as it can.
QUICK = Plan(
    "quick",
    {1: 1, 4: 4, 16: 16},
    {1: 6, 4: 6, 16: 18},
    tuple((2, t) for t in (64, 56, 48, 40, 36, 32, 28, 24, 20, 16, 12, 8)),
    rounds_s=460.0,
    check_s=70.0,
    deadline_s=590.0,
)
# More requests than places: as many as places would only show how a batch runs empty.
FULL = Plan(
    "full",
    {1: 2, 4: 8, 16: 24},
    {1: 6, 4: 12, 16: 24},
    (
        *((4, t) for t in (128, 112, 96)),
        *((2, t) for t in (160, 128, 112, 96, 80, 64, 56, 48, 40, 32, 24, 16)),
    ),
    rounds_s=1800.0,
    check_s=240.0,
    deadline_s=2640.0,
)


@dataclass(slots=True, frozen=True)
class Costs:
    """What plain decoding costs here: ms a step by concurrency, and ms a prompt token."""

    step_ms: dict[int, float]
    prompt_token_ms: float

    def seconds(self, cell: Cell, prompt_tokens: Sequence[int], lengths: Sequence[int]) -> float:
        """Return what a cell should take without speculation; lengths: outputs' by prompt."""
        prompt_ms = self.prompt_token_ms * sum(prompt_tokens[i] for i in cell.prompts)
        outputs = [lengths[i] for i in cell.prompts]
        full = sum(outputs) / cell.concurrency
        thin = max(max(outputs) - full, 0.0)  # the longest go on in a batch that empties
        return 1e-3 * (
            prompt_ms + full * self.step_ms[cell.concurrency] + thin * min(self.step_ms.values())
        )


def measure_costs(
    engine: Engine,
    prompts: Sequence[DemoPrompt],
    prompt_ids: Sequence[list[int]],
) -> Costs:
    """Decode a few tokens without speculation at each concurrency; also warms the backend up."""
    step_ms: dict[int, float] = {}
    prompt_ms = prompt_tokens = 0.0
    for c in CONCURRENCIES:
        cell = Cell(MIXED, c, tuple(range(len(prompts)))[:c])
        lengths = [_PROBE_TOKENS[c]] * len(prompts)
        run = run_cell(engine, cell, prompts, prompt_ids, lengths)
        full = [ms for ms, rows, _ in run.steps.timeline if rows.sum() == len(cell.prompts)]
        step_ms[c] = median(full or [1e3 * run.seconds / _PROBE_TOKENS[c]])
        prompt_ms += max(1e3 * run.seconds - len(run.steps.timeline) * step_ms[c], 0.0)
        prompt_tokens += sum(len(prompt_ids[i]) for i in cell.prompts)
    return Costs(step_ms, prompt_ms / prompt_tokens)


def choose_shape(
    plan: Plan,
    costs: Costs,
    prompts: Sequence[DemoPrompt],
    prompt_ids: Sequence[list[int]],
    modes: int,
) -> Shape:
    """Return the best wish that should fit, else the last.

    Every mode is taken to cost what no speculation costs.
    """
    tokens = [len(ids) for ids in prompt_ids]
    for rounds, output_tokens in plan.wishes:
        shape = Shape(rounds, output_tokens, plan.task_requests, plan.mixed_requests)
        lengths = output_lengths(prompts, output_tokens)
        a_pass_s = sum(costs.seconds(c, tokens, lengths) for c in cells_of(prompts, shape))
        if rounds * modes * a_pass_s <= plan.rounds_s:
            break
    return shape
