"""A step-time process with a known gain, to play guards on: noisy, with load that drifts.

A step that drafts nothing takes `bypass_ms(rows)`; one that speculates emits TOKENS a row on
average and takes TOKENS / gain times as long. Both times carry log-normal noise, the load is a
slowly moving AR(1) of the logarithm of the rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from parlay.policies.baselines.rows import rows_plan
from parlay.policies.guard import Guard
from parlay.policies.policy import Policy, Stateless
from parlay.policies.types import (
    Array,
    BatchView,
    Plan,
    PlanSource,
    Proposer,
    Reason,
    StepOutcome,
    no_shadows,
)

K = 3
HOLDS = 0.5
TOKENS = 1.0 + K * HOLDS
CATCH_UP = 0.5
MOST_ROWS = 64


class AlwaysDrafts(Stateless):
    """Three tokens of the draft model for every row; counts what it is asked and told."""

    name = "always"

    def __init__(self) -> None:
        self.decided, self.observed = 0, 0

    def decide(self, view: BatchView) -> Plan:
        self.decided += 1
        return rows_plan(view, Proposer.DRAFT_MODEL, np.full(len(view), K), Reason.FIXED)

    def observe(self, outcome: StepOutcome) -> None:
        self.observed += 1


@dataclass
class Ran:
    """By step: its ms, and those of its tokens without drafts; did it draft; was the guard on."""

    ms: Array
    bypass_ms: Array
    treated: Array
    on: Array

    @property
    def loss(self) -> float:
        """Share of the time without speculation that was lost; below 0 a gain."""
        return float(self.ms.sum() / self.bypass_ms.sum() - 1.0)


def view_of(rows: int, step_id: int) -> BatchView:
    view = _view(rows)
    view.step_id = step_id
    return view


@functools.cache
def _view(rows: int) -> BatchView:
    whole = np.zeros(rows, np.int32)
    return BatchView(
        request_id=np.arange(rows, dtype=np.uint64),
        task=np.zeros(rows, np.uint32),
        context_tokens=whole,
        output_tokens=whole,
        prefill_tokens=whole,
        temperature=np.zeros(rows, np.float32),
        max_k=np.full(rows, K, np.int32),
        proposer_mask=np.full(rows, 0b0111, np.uint8),
        tpot_target_ms=np.full(rows, np.nan, np.float32),
        recent_accept=np.ones(rows, np.float32),
        match_tokens=whole,
        draft_kv_lag=whole,
        seeded=np.zeros(rows, bool),
        running=rows,
    )


def outcome_of(
    view: BatchView, plan: Plan, accepted: Array, ms: float, prefill: int = 0
) -> StepOutcome:
    return replace(
        _outcome(len(view)),
        proposer=plan.proposer,
        requested_k=plan.k,
        drafted_k=plan.k,
        verified_k=plan.k,
        accepted=accepted,
        emitted=accepted + np.int16(1),
        plan_step_id=np.full(len(view), plan.step_id, np.uint64),
        step_id=view.step_id,
        prefill_tokens=prefill,
        step_ms=ms,
    )


@functools.cache
def _outcome(rows: int) -> StepOutcome:
    view, none = _view(rows), np.zeros(rows, np.int16)
    return StepOutcome(
        request_id=view.request_id,
        task=view.task,
        proposer=np.zeros(rows, np.uint8),
        requested_k=none,
        drafted_k=none,
        verified_k=none,
        accepted=none,
        emitted=none,
        match_tokens=view.match_tokens,
        truncated_by=np.zeros(rows, np.uint8),
        plan_source=np.full(rows, int(PlanSource.LOCAL), np.uint8),
        plan_step_id=np.zeros(rows, np.uint64),
        confidences=np.zeros((rows, 0), np.float32),
        shadow=no_shadows(),
    )


def usual_ms(rows: Array | int) -> Array:
    """Return the time of a step without drafts, in ms."""
    return np.asarray(8.0 + 0.15 * np.asarray(rows))


def load_of(rng: np.random.Generator, steps: int, mean_rows: float) -> Array:
    """Return rows [steps]: an AR(1) of log rows, sd .3, that forgets in 100 steps."""
    jumps, log_rows = 0.3 * np.sqrt(0.02) * rng.normal(size=steps), np.empty(steps)
    level = 0.3 * rng.normal()
    for i, jump in enumerate(jumps.tolist()):
        level = 0.99 * level + jump
        log_rows[i] = level
    return np.clip(np.rint(mean_rows * np.exp(log_rows)), 1, MOST_ROWS).astype(int)


def run(
    policy: Policy, gain: Array, seed: int, noise: float = 0.15, mean_rows: float = 12.0
) -> Ran:
    """Play `policy` over a gain [steps]; noise: sd of the log of a step's time."""
    rng, steps = np.random.default_rng(seed), len(gain)
    load = load_of(rng, steps, mean_rows)
    jolt = np.exp(noise * rng.normal(size=steps) - 0.5 * noise**2)
    jolt *= np.where(rng.random(steps) < 0.01, 2.0, 1.0)
    base, expected = usual_ms(load), float(jolt.mean())
    held = rng.random((steps, MOST_ROWS, K)) < HOLDS
    accepted = held.sum(axis=2).astype(np.int16)
    ran = Ran(np.empty(steps), np.empty(steps), np.zeros(steps, bool), np.ones(steps, bool))
    idle = 0
    for i in range(steps):
        rows = int(load[i])
        view = view_of(rows, i)
        plan = policy.decide(view)
        treated = bool(plan.k.any())
        emits = accepted[i, :rows] if treated else np.zeros(rows, np.int16)
        ms = base[i] * jolt[i]
        if treated:
            ms *= TOKENS / gain[i] + CATCH_UP * min(idle, 8) / 8.0
        idle = 0 if treated else idle + 1
        policy.observe(outcome_of(view, plan, emits, float(ms)))
        ran.ms[i], ran.treated[i] = ms, treated
        if isinstance(policy, Guard):
            ran.on[i] = policy.on
        ran.bypass_ms[i] = base[i] * expected * (1.0 + float(emits.sum()) / rows)
    return ran
