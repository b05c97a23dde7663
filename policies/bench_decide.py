"""`parlay bench decide`: what a policy's decision costs, and fitting and learning beside it.

Needs no library but numpy: the command line reads the options off the function's arguments,
its help off the docstring. Raises ValueError where there is no such policy or nothing to measure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.files import check_writable, write_json
from parlay.policies.policy import EngineLimits, Policy, make_policy, registry
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    PROPOSERS,
    Array,
    BatchView,
    Fitted,
    Plan,
    PlanSource,
    ShadowKind,
    ShadowRows,
    StepOutcome,
    task_id,
)

REQUESTS = (1, 32, 256)
LIMITS = EngineLimits(proposer_mask=0b0111, k_max=8, token_budget=4096)
WARM_UP_STEPS = 30
"""Learning begins here, and the first steps pay for what is made once."""
_COLUMNS = ("p50_us", "p99_us", "fit_p50_us", "observe_p50_us")
_OUTPUT_TOKENS = 160
_BAR = 30
_SHADOW_TOKENS = 8


@dataclass(slots=True, frozen=True)
class Kind:
    """Requests of one task: how often the n-gram matches, and what each place accepts."""

    tag: str
    match_rate: float
    ngram: float
    draft: float


KINDS = (
    Kind("edit", 0.75, 0.90, 0.45),
    Kind("chat", 0.25, 0.40, 0.60),
    Kind("code", 0.50, 0.75, 0.55),
    Kind("", 0.10, 0.20, 0.40),
)


class Traffic:
    """Requests of mixed tasks, each followed by another; what they do is drawn by (seed, step)."""

    def __init__(self, requests: int, seed: int = 0) -> None:
        rng = np.random.default_rng((seed, requests))
        self.seed, self.step_id, self._next_id = seed, 0, requests + 1
        self._id = np.arange(1, requests + 1, dtype=np.uint64)
        self._kind = rng.integers(0, len(KINDS), requests)
        self._prompt = rng.integers(30, 2000, requests)
        self._output = rng.integers(1, _OUTPUT_TOKENS - 1, requests)
        self._lag = rng.integers(0, 60, requests)
        self._recent = np.ones(requests)
        self._task = np.array([task_id(kind.tag) for kind in KINDS], np.uint32)
        chances = [(kind.match_rate, kind.ngram, kind.draft) for kind in KINDS]
        self._match_rate, self._ngram, self._draft = np.array(chances).T

    def view(self) -> BatchView:
        """Return the batch before its next step."""
        rows, rng = len(self._id), np.random.default_rng((self.seed, self.step_id, 0))
        matches = rng.random(rows) < self._match_rate[self._kind]
        context = (self._prompt + self._output).astype(np.int32)
        left = _OUTPUT_TOKENS - self._output - 1
        return BatchView(
            request_id=self._id.copy(),
            task=self._task[self._kind],
            context_tokens=context,
            output_tokens=self._output.astype(np.int32),
            prefill_tokens=np.where(self._output == 0, self._prompt, 0).astype(np.int32),
            temperature=np.where(self._id % 3 == 0, 0.8, 0.0).astype(np.float32),
            max_k=np.clip(left, 0, LIMITS.k_max).astype(np.int32),
            proposer_mask=np.full(rows, LIMITS.proposer_mask, np.uint8),
            tpot_target_ms=np.full(rows, np.nan, np.float32),
            recent_accept=self._recent.astype(np.float32),
            match_tokens=(matches * np.minimum(rng.geometric(0.25, rows), 40)).astype(np.int32),
            draft_kv_lag=self._lag.astype(np.int32),
            seeded=self._id % 5 == 0,
            step_id=self.step_id,
            running=rows,
            free_blocks=16 * rows,
            total_blocks=256 * rows,
            kv_tokens=int(context.sum()),
        )

    def step(self, view: BatchView, plan: Plan, fit: Fitted) -> StepOutcome:
        """Run the step as fitted, and return what it did."""
        rng = np.random.default_rng((self.seed, self.step_id, 1))
        by_model = fit.proposer == DRAFT_MODEL
        accept = np.where(by_model, self._draft[self._kind], self._ngram[self._kind])
        holds = rng.random((len(view), LIMITS.k_max)) < accept[:, None]
        accepted = np.minimum(np.cumprod(holds, axis=1).sum(axis=1), fit.k)
        confidences = np.full(holds.shape, np.nan, np.float32)
        drawn = np.clip(accept[:, None] + rng.normal(0.1, 0.2, holds.shape), 0.02, 0.99)
        shown = by_model[:, None] & (np.arange(LIMITS.k_max) < fit.k[:, None])
        confidences[shown] = drawn[shown]
        emitted = np.where(view.prefill_tokens > 0, 1, accepted + 1)
        shadow = self._shadows(view, fit, rng)
        outcome = _outcome(view, plan, fit, accepted, emitted, confidences, shadow)
        self._advance(by_model, emitted)
        return outcome

    def _shadows(self, view: BatchView, fit: Fitted, rng: np.random.Generator) -> ShadowRows:
        """Return the n-gram scored where it matched and another drafted."""
        row = np.flatnonzero((fit.proposer != NGRAM) & (view.match_tokens > 0))
        holds = rng.random((len(row), _SHADOW_TOKENS)) < self._ngram[self._kind[row]][:, None]
        matched = np.cumprod(holds, axis=1).sum(axis=1)
        return ShadowRows(
            request_id=view.request_id[row],
            proposer=np.full(len(row), NGRAM, np.uint8),
            offered_k=np.full(len(row), _SHADOW_TOKENS, np.int16),
            matched=matched.astype(np.float32),
            observed=np.minimum(matched + 1, _SHADOW_TOKENS).astype(np.int16),
            match_tokens=view.match_tokens[row],
            kind=np.full(len(row), ShadowKind.MATCH, np.uint8),
        )

    def _advance(self, by_model: Array, emitted: Array) -> None:
        self._output = self._output + emitted
        self._lag = np.where(by_model, 0, self._lag + emitted)
        self._recent = 0.9 * self._recent + 0.1 * emitted
        ended = np.flatnonzero(self._output >= _OUTPUT_TOKENS)
        self._id[ended] = self._next_id + np.arange(len(ended))
        self._next_id += len(ended)
        self._output[ended], self._recent[ended] = 0, 1.0
        self._lag[ended] = self._prompt[ended]
        self.step_id += 1


def _outcome(
    view: BatchView,
    plan: Plan,
    fit: Fitted,
    accepted: Array,
    emitted: Array,
    confidences: Array,
    shadow: ShadowRows,
) -> StepOutcome:
    """Put a step's outcome together; times grow with tokens and passes as on a small GPU."""
    rows, k = len(view), fit.k.astype(np.int16)
    tokens = rows + int(fit.k.sum() + view.prefill_tokens.sum())
    depth = int(fit.k[fit.proposer == DRAFT_MODEL].max(initial=0))
    draft_ms = np.zeros(PROPOSERS, np.float32)
    draft_ms[DRAFT_MODEL] = 0.4 * depth
    verify_ms = 5.0 + 0.02 * tokens
    return StepOutcome(
        request_id=view.request_id,
        task=view.task,
        proposer=fit.proposer,
        requested_k=k,
        drafted_k=k,
        verified_k=k,
        accepted=accepted.astype(np.int16),
        emitted=emitted.astype(np.int16),
        match_tokens=view.match_tokens,
        truncated_by=np.zeros(rows, np.uint8),
        plan_source=np.full(rows, PlanSource.LOCAL, np.uint8),
        plan_step_id=np.full(rows, plan.step_id, np.uint64),
        confidences=confidences,
        shadow=shadow,
        step_id=view.step_id,
        padded_tokens=tokens,
        prefill_tokens=int(view.prefill_tokens.sum()),
        kv_tokens=view.kv_tokens,
        draft_ms=draft_ms,
        draft_depth=depth,
        verify_ms=verify_ms,
        step_ms=verify_ms + 0.4 * depth + 0.5,
    )


def bench_decide(policy: str = "", steps: int = 200, json: Path | None = None) -> None:
    """Time decide, fit_plan and observe of every policy, or one, at 1, 32 and 256 requests.

    --steps are measured at each size, after some to warm up; --json names a file for the figures.
    """
    if steps < 1:
        raise ValueError(f"bench decide: --steps must be 1 or more, not {steps}")
    names = [policy] if policy else sorted(registry())
    make_policy(names[0], None, LIMITS)
    if json is not None:
        check_writable(json)
    made = [(name, requests) for name in names for requests in REQUESTS]
    shown = sys.stderr.isatty()
    rows = [measure(name, requests, steps) for name, requests in _progress(made, shown)]
    print("\n".join(_table(rows)))
    if json is not None:
        write_json(json, {"rows": rows})


def measure(name: str, requests: int, steps: int) -> dict[str, Any]:
    """Return one row of the report: microseconds of each call, over `steps` steps of traffic."""
    policy, traffic = make_policy(name, None, LIMITS), Traffic(requests)
    took_us = np.array([_step_us(policy, traffic) for _ in range(WARM_UP_STEPS + steps)])
    decide_us, fit_us, observe_us = took_us[WARM_UP_STEPS:].T
    p50_us, p99_us = np.percentile(decide_us, [50, 99])
    figures = p50_us, p99_us, np.median(fit_us), np.median(observe_us)
    rounded = {column: round(float(us), 2) for column, us in zip(_COLUMNS, figures, strict=True)}
    return {"policy": name, "requests": requests, **rounded}


def _step_us(policy: Policy, traffic: Traffic) -> tuple[float, float, float]:
    """Run one step; return what decide, fit_plan and observe took."""
    view = traffic.view()
    decide_us, plan = _timed(lambda: policy.decide(view))
    fit_us, fit = _timed(lambda: fit_plan(plan, view))
    outcome = traffic.step(view, plan, fit)
    observe_us, _ = _timed(lambda: policy.observe(outcome))
    return decide_us, fit_us, observe_us


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin_ns = time.perf_counter_ns()
    found = call()
    return 1e-3 * (time.perf_counter_ns() - begin_ns), found


def _progress(made: list[tuple[str, int]], shown: bool) -> Iterable[tuple[str, int]]:
    """Yield what is to be measured, under a bar where a terminal shows it."""
    for done, (name, requests) in enumerate(made):
        if shown:
            bar = "#" * (_BAR * done // len(made))
            doing = f"{name}, {requests} requests"
            print(f"\r[{bar:{_BAR}}] {doing:40}", end="", file=sys.stderr, flush=True)
        yield name, requests
    if shown:
        print("\r" + " " * (_BAR + 43) + "\r", end="", file=sys.stderr, flush=True)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    lines = [f"{'policy':{width}} {'requests':>8}" + "".join(f" {c:>14}" for c in _COLUMNS)]
    lines += [
        f"{row['policy']:{width}} {row['requests']:8}"
        + "".join(f" {row[column]:14.1f}" for column in _COLUMNS)
        for row in rows
    ]
    return lines
