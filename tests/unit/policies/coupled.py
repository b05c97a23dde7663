"""A closed loop of requests that share their step's time, for the tests of off-policy evaluation.

Tasks have hazards of their own, requests a difficulty of their own, the first tokens accept half as
often, and the n-gram matches only now and then. Vectorised over rows; every run draws anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.baselines.rows import rows_plan
from parlay.policies.log_schema import LoggedStep, rows_of, steps_of
from parlay.policies.policy import Policy, Stateless
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    PROPOSERS,
    Array,
    BatchView,
    Fitted,
    Plan,
    Reason,
    StepOutcome,
    no_shadows,
)

K = 6
TASKS = (11, 22, 33)
ACCEPT = {
    NGRAM: np.array([[0.9] * K, [0.5] * K, [0.3] * K]),
    DRAFT_MODEL: np.array([[0.6, 0.6, 0.6, 0.55, 0.5, 0.5], [0.8] * K, [0.4] * K]),
}
MATCH = np.array([0.7, 0.3, 0.1])
SPREAD = 0.5
WARM_UP = 120
ARMS = [(0, 0)] + [(DRAFT_MODEL, k) for k in (1, 2, 3, 5)] + [(NGRAM, k) for k in (2, 5)]
CHANCES = np.array([0.16, 0.12, 0.12, 0.16, 0.12, 0.16, 0.16])


@dataclass
class Fixed(Stateless):
    """Drafts (proposer, k) by task, the last where a first choice of the n-gram has no match."""

    by_task: Mapping[int, tuple[int, int]]
    name: str = "by_task"

    def decide(self, view: BatchView) -> Plan:
        chosen = np.array([self.by_task[int(t)] for t in view.task]).reshape(-1, 2)
        return rows_plan(view, chosen[:, 0], chosen[:, 1])


@dataclass
class Exploring(Stateless):
    """Draws each row's arm; its chances fall back on depth for requests that went badly."""

    seed: int
    adaptive: bool = False
    name: str = "exploring"
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 5])

    def decide(self, view: BatchView) -> Plan:
        chance = np.tile(CHANCES, (len(view), 1))
        if self.adaptive:
            depth = np.array([k for _, k in ARMS])
            chance = chance * np.exp(0.25 * depth * (view.recent_accept - 2.0)[:, None])
            chance = 0.3 * CHANCES + 0.7 * chance / chance.sum(axis=1, keepdims=True)
        drawn = self.rng.random(len(view))[:, None] > np.cumsum(chance, axis=1)
        arm = np.minimum(drawn.sum(axis=1), len(ARMS) - 1)
        arms = np.array(ARMS)
        plan = rows_plan(view, arms[arm, 0], arms[arm, 1], Reason.EXPLORE)
        plan.propensity = chance[np.arange(len(view)), arm].astype(np.float32)
        return plan


def step_ms(view: BatchView, proposer: Array, drafted: Array) -> float:
    """Time that the whole batch waits: verification with a knee, and passes of the draft model."""
    tokens = len(view) + int(drafted.sum())
    drafts = proposer == DRAFT_MODEL
    depth = int(drafted[drafts].max(initial=0))
    return 8.0 + 0.05 * tokens + 0.15 * max(0, tokens - 24) + 0.5 * depth


@dataclass
class Loop:
    """Requests in flight, and what a step does to them."""

    rng: np.random.Generator
    rows: int
    started: int = 0

    def __post_init__(self) -> None:
        self.request_id, self.output = np.zeros((2, self.rows), np.int64)
        self.length, self.task = np.zeros((2, self.rows), np.int64)
        self.shift, self.recent = np.zeros(self.rows), np.ones(self.rows)
        self._start(np.ones(self.rows, bool))

    def _start(self, new: Array) -> None:
        count = int(new.sum())
        self.request_id[new] = self.started + 1 + np.arange(count)
        self.started += count
        self.task[new] = self.rng.integers(0, len(TASKS), count)
        self.length[new] = self.rng.integers(20, 60, count)
        self.output[new], self.recent[new] = 0, 2.0
        self.shift[new] = self.rng.normal(0.0, SPREAD, count)

    def view(self, step_id: int) -> BatchView:
        n = self.rows
        match = np.where(self.rng.random(n) < MATCH[self.task], 4, 0)
        return BatchView(
            request_id=self.request_id.astype(np.uint64),
            task=np.array(TASKS, np.uint32)[self.task],
            context_tokens=(50 + self.output).astype(np.int32),
            output_tokens=self.output.astype(np.int32),
            prefill_tokens=np.zeros(n, np.int32),
            temperature=np.zeros(n, np.float32),
            max_k=np.minimum(K, self.length - self.output - 1).astype(np.int32),
            proposer_mask=np.full(n, 0b111, np.uint8),
            tpot_target_ms=np.full(n, np.nan, np.float32),
            recent_accept=self.recent.astype(np.float32),
            match_tokens=match.astype(np.int32),
            draft_kv_lag=np.zeros(n, np.int32),
            seeded=np.zeros(n, bool),
            step_id=step_id,
            running=n,
        )

    def step(self, view: BatchView, proposer: Array, k: Array, plan_step: int) -> StepOutcome:
        accept = np.zeros((self.rows, K))
        for who, table in ACCEPT.items():
            accept[proposer == who] = table[self.task[proposer == who]]
        odds = np.log(np.maximum(accept, 1e-9) / (1.0 - accept)) + self.shift[:, None]
        chance = 1.0 / (1.0 + np.exp(-odds)) * np.where(self.output < 2, 0.5, 1.0)[:, None]
        held = (self.rng.random((self.rows, K)) < chance) & (np.arange(K) < k[:, None])
        accepted = np.cumprod(held, axis=1).sum(axis=1)
        jolt = np.exp(self.rng.normal(0.0, 0.05)) * (2.0 if self.rng.random() < 0.02 else 1.0)
        ms = step_ms(view, proposer, k) * jolt
        outcome = StepOutcome(
            request_id=view.request_id,
            task=view.task,
            proposer=proposer.astype(np.uint8),
            requested_k=k.astype(np.int16),
            drafted_k=k.astype(np.int16),
            verified_k=k.astype(np.int16),
            accepted=accepted.astype(np.int16),
            emitted=(accepted + 1).astype(np.int16),
            match_tokens=view.match_tokens,
            truncated_by=np.zeros(self.rows, np.uint8),
            plan_source=np.ones(self.rows, np.uint8),
            plan_step_id=np.full(self.rows, plan_step, np.uint64),
            confidences=np.zeros((self.rows, 0), np.float32),
            shadow=no_shadows(),
            step_id=view.step_id,
            draft_ms=np.zeros(PROPOSERS, np.float32),
            verify_ms=ms,
            step_ms=ms,
        )
        self.output += accepted + 1
        self.recent += 0.2 * (accepted + 1 - self.recent)
        self._start(self.output >= self.length)
        return outcome


def played(
    policy: Policy, steps: int, rng: np.random.Generator, rows: int
) -> Iterator[tuple[BatchView, Plan, Fitted, StepOutcome]]:
    """Run a loop, and yield its steps once those are over in which all requests started at once."""
    loop = Loop(rng, rows)
    for step_id in range(WARM_UP + steps):
        view = loop.view(step_id)
        plan = policy.decide(view)
        fit = fit_plan(plan, view)
        outcome = loop.step(view, fit.proposer, fit.k.astype(np.int64), step_id)
        policy.observe(outcome)
        if step_id >= WARM_UP:
            yield view, plan, fit, outcome


def run(policy: Policy, steps: int, seed: int, rows: int = 16) -> list[LoggedStep]:
    """Return the log of a run."""
    logged: list[LoggedStep] = []
    rng = np.random.default_rng([seed, 77])
    for view, plan, fit, outcome in played(policy, steps, rng, rows):
        logged.extend(steps_of(rows_of(view, fit, plan, outcome)))
    return logged


def goodput(make: Callable[[int], Policy], steps: int, runs: int, rows: int = 16) -> float:
    """Return tokens per second over many fresh runs."""
    tokens, ms = 0, 0.0
    for number in range(runs):
        rng = np.random.default_rng([number, 78])
        for _, _, _, outcome in played(make(number), steps, rng, rows):
            tokens, ms = tokens + int(outcome.emitted.sum()), ms + outcome.step_ms
    return 1e3 * tokens / ms
