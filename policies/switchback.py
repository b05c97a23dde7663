"""Blocks of steps with and without speculation: what each step says, what it cost, how a pair ends.

Two blocks are compared by goodput per decoding row, and only where rows and prompts were alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from parlay.policies.types import Array, PlanSource, StepOutcome

PREFILL_MOST = 64
"""A step with more prompt tokens is compared with its like only."""
_LIKE = 0.3
"""Log-ratio of rows, or of prompt tokens, up to which two blocks are alike."""
_SPIKE = 4.0
_MEMORY_STEPS = 32
_RATE_MEMORY = 16.0
_MOST_UNTOLD = 16
LOAD_CHANGE, _LOAD_MEMORY = math.log(2.0), 8.0
FIRST_GAP_STEPS = 4
GAP, FIRST, SECOND = range(3)
"""Phases: between pairs, and the two blocks of one."""


@dataclass(slots=True)
class Schedule:
    """Which block is running; `block` counts blocks and gaps, so that outcomes find theirs.

    expects: log of the gain that the wrapped policy expects of late, 0 where it does not say; a
    mean over its last plans, of which so many were heard.
    """

    on: bool = True
    pair: int = 0
    phase: int = GAP
    decided: int = 0
    measured: int = 0
    gap: int = FIRST_GAP_STEPS
    this_gap: int = FIRST_GAP_STEPS
    treated_first: bool = False
    plain_steps: int = 0
    block: int = 0
    seen_block: int = -1
    seen: int = 0
    inner_version: int = 0
    expects: float = 0.0
    heard: int = 0

    def treated(self) -> bool:
        """Say whether the wrapped policy's plan is applied now."""
        return self.on if self.phase == GAP else self.treated_first == (self.phase == FIRST)


@dataclass(slots=True)
class Ledger:
    """Time in ms, costs, and what is known of rates (ms for each row's token) and load."""

    steps: int = 0
    last_step: int = -1
    log_ms: float = 0.0
    elapsed_ms: float = 0.0
    loss_ms: float = 0.0
    pending_ms: float = 0.0
    probing_ms: float = 0.0
    bypass_ms: float = 0.0
    bypass_tokens: float = 0.0
    treated_ms: float = 0.0
    treated_tokens: float = 0.0
    treated_steps: float = 0.0
    hope: float = 0.0
    load: float = math.nan
    switches: int = 0
    probes: int = 0
    resets: int = 0

    def tick(self, step_id: int, step_ms: float) -> float:
        """Add a step's time, and that of steps that were not told of; return it, spikes cut."""
        untold = min(max(step_id - self.last_step, 1), _MOST_UNTOLD) if self.steps else 1
        self.last_step, self.steps = step_id, self.steps + 1
        if self.steps > 1:
            step_ms = min(step_ms, _SPIKE * self.mean_ms)
        self.log_ms += (math.log(step_ms) - self.log_ms) / min(self.steps, _MEMORY_STEPS)
        self.elapsed_ms += step_ms * untold
        return step_ms

    def learn(self, treated: bool, tokens: float, ms: float) -> None:
        """Move the rate of steps with, or without, speculation."""
        keep = 1.0 - 1.0 / _RATE_MEMORY
        if treated:
            self.treated_ms = keep * self.treated_ms + ms
            self.treated_tokens = keep * self.treated_tokens + tokens
            self.treated_steps = keep * self.treated_steps + 1.0
        else:
            self.bypass_ms = keep * self.bypass_ms + ms
            self.bypass_tokens = keep * self.bypass_tokens + tokens

    def excess_ms(self, on: bool, tokens: float, ms: float) -> float:
        """Return what a step took beyond the usual time of its tokens, guard on or off."""
        usual = (
            (self.treated_ms, self.treated_tokens) if on else (self.bypass_ms, self.bypass_tokens)
        )
        return ms - tokens * usual[0] / usual[1] if usual[1] else 0.0

    def missed_ms(self, tokens: float) -> float:
        """Return the usual time, by the policy's plans, of what a step emitted less than usual."""
        if not self.treated_tokens:
            return 0.0
        missed = self.treated_tokens / self.treated_steps - tokens
        return max(missed, 0.0) * self.treated_ms / self.treated_tokens

    def moves_to(self, load: float) -> bool:
        """Follow the mean log rows of a pair; return whether it is another load altogether."""
        moved = abs(load - self.load) > LOAD_CHANGE
        start = moved or math.isnan(self.load)
        self.load = load if start else self.load + (load - self.load) / _LOAD_MEMORY
        return moved

    @property
    def mean_ms(self) -> float:
        """Usual time of a step."""
        return math.exp(self.log_ms)


@dataclass(slots=True, frozen=True)
class Step:
    """One finished step: tokens emitted for each decoding row, time, and what makes it comparable.

    drafted: did any row draft; prefill: prompt tokens.
    """

    tokens: float
    ms: float
    rows: int
    drafted: bool
    prefill: int


def plan_of(outcome: StepOutcome) -> int:
    """Return the step whose plan the decoding rows followed; -1 where none did."""
    if len(outcome) == 1:
        follows = outcome.plan_source[0] != int(PlanSource.DEFAULT) and outcome.emitted[0] > 0
        return int(outcome.plan_step_id[0]) if follows else -1
    at = (outcome.plan_source != int(PlanSource.DEFAULT)) & (outcome.emitted > 0)
    return int(outcome.plan_step_id[at.argmax()]) if at.any() else -1


def step_of(outcome: StepOutcome, ms: float) -> Step:
    """Return what the guard reads of an outcome; ms: its time, spikes cut."""
    if len(outcome) == 1:
        emitted, drafted = int(outcome.emitted[0]), bool(outcome.drafted_k[0])
        return Step(float(emitted), ms, int(emitted != 0), drafted, outcome.prefill_tokens)
    rows = int(np.count_nonzero(outcome.emitted))
    tokens = float(outcome.emitted.sum()) / max(rows, 1)
    return Step(tokens, ms, rows, bool(outcome.drafted_k.any()), outcome.prefill_tokens)


def log_gain(
    treated: Array, bypass: Array, block_steps: int, plain_steps: int = 0
) -> tuple[float, float] | None:
    """Return a pair's log goodput ratio and mean log rows; None where the blocks are not alike.

    treated, bypass [2, 6]: sums over steps without prompts, and over all, of blocks of block_steps
    and plain_steps (0: as many), of which half must be there. Where a busy engine has
    too few of the former, all are compared, provided the prompts were alike.
    """
    plain_steps = plain_steps or block_steps
    for kind in (0, 1):
        ours, theirs = treated[kind], bypass[kind]
        if ours[0] >= (block_steps + 1) // 2 and theirs[0] >= (plain_steps + 1) // 2:
            _, tokens, ms, log_rows, prefill, drafted = ours / ours[0]
            _, base_tokens, base_ms, base_rows, base_prefill, _ = theirs / theirs[0]
            prompts = abs(math.log((prefill + PREFILL_MOST) / (base_prefill + PREFILL_MOST)))
            if abs(log_rows - base_rows) > _LIKE or prompts > _LIKE:
                return None
            # Without a draft it was no speculation under another name: the gain is 1, noise apart.
            ratio = tokens * base_ms / (ms * base_tokens) if drafted else 1.0
            return math.log(ratio), 0.5 * float(log_rows + base_rows)
    return None


Record = TypeVar("Record", Schedule, Ledger)


def filled(record: Record, values: Array) -> Record:
    """Return `record` with its fields, whole numbers and flags among them, read from a vector."""
    for field, value in zip(fields(record), values.tolist(), strict=True):
        setattr(record, field.name, type(getattr(record, field.name))(value))
    return record
