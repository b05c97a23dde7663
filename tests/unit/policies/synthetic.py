"""A batch of synthetic requests on a virtual clock, to play policies on the same coin flips.

Flips are keyed by (seed, request, output position, proposer), so two policies that reach the same
position with the same proposer see the same fate. Costs are the shape measured with a 135M model on
a CPU (see `Machine`); hazards stand in `TASKS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits, Policy
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    ShadowRows,
    StepOutcome,
    task_id,
)

K = 16
LIMITS = EngineLimits(proposer_mask=0b0111, k_max=K)


@dataclass(frozen=True)
class Task:
    """How often the n-gram matches; acceptance by position, the last repeats; logit spread."""

    match_rate: float
    ngram: tuple[float, ...]
    draft: tuple[float, ...]
    spread: float = 0.5


TASKS = {
    "edit": Task(0.75, (0.75, 0.90, 0.93, 0.95), (0.45, 0.40)),
    "chat": Task(0.25, (0.25, 0.35, 0.45), (0.55, 0.58, 0.60)),
    "chat_poor_draft": Task(0.25, (0.25, 0.35, 0.45), (0.12, 0.10)),
    "logs": Task(0.85, (0.80, 0.92, 0.94), (0.25, 0.20)),
    "hostile": Task(0.30, (0.02,), (0.03,), 0.2),
}


@dataclass(frozen=True)
class Machine:
    """Step times in ms, or as a share of a one-token step; noise and spikes."""

    one_token_ms: float = 35.0
    draft_pass: float = 0.025
    draft_token: float = 0.0012
    host_ms: float = 1.0
    noise: float = 0.05
    spikes: float = 0.02

    def verify_ms(self, tokens: int, kv_tokens: int) -> float:
        at = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        slowdown = [1.0, 1.05, 1.08, 1.16, 1.30, 1.65, 2.1, 2.9, 4.4]
        return self.one_token_ms * (float(np.interp(tokens, at, slowdown)) + 3e-5 * kv_tokens)


@dataclass
class Request:
    """One request with its coin flips."""

    request_id: int
    tag: str
    length: int
    match: Array
    holds: dict[int, Array]
    position: int = 0
    draft_position: int = -60

    @property
    def lag(self) -> int:
        return self.position - self.draft_position


@dataclass
class Played:
    """What came of it: tokens and ms of each step, tokens drafted in it by proposer."""

    tokens: list[int] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    drafted: list[Array] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * sum(self.tokens) / sum(self.ms)


def make_request(seed: int, number: int, tag: str) -> Request:
    task = TASKS[tag]
    rng = np.random.default_rng([seed, number])
    length = int(rng.integers(60, 120))
    size = length + K + 1
    match = np.where(rng.random(size) < task.match_rate, 1 + rng.geometric(0.35, size), 0)
    match[match > 0] -= 1
    match = np.minimum(match, 20)
    shift = rng.normal(0.0, task.spread, PROPOSERS)
    holds = {}
    for proposer, accept in ((NGRAM, task.ngram), (DRAFT_MODEL, task.draft)):
        p = np.array([accept[min(j, len(accept) - 1)] for j in range(K)])
        odds = np.log(p / (1 - p)) + shift[proposer] + np.zeros((size, 1))
        if proposer == NGRAM and tag != "hostile":
            odds = odds + 0.5 * np.log(np.maximum(match, 1) / 2.0)[:, None]
        odds[:2] -= 0.7
        flips = np.random.default_rng([seed, number, proposer]).random((size, K))
        failed = flips > 1 / (1 + np.exp(-odds))
        holds[proposer] = np.where(failed.any(axis=1), failed.argmax(axis=1), K)
    return Request(number + 1, tag, length, match, holds)


def play(
    policy: Policy,
    tags: list[str],
    steps: int,
    seed: int = 0,
    machine: Machine = Machine(),
    limits: EngineLimits = LIMITS,
) -> Played:
    """Run `policy` over a closed loop of requests, each followed by another of its tag."""
    played, number = Played(), len(tags)
    requests = [make_request(seed, n, tag) for n, tag in enumerate(tags)]
    noise = np.random.default_rng([seed, 999])
    for step_id in range(steps):
        view = view_of(requests, step_id, limits)
        plan = policy.decide(view)
        outcome = step(requests, view, plan, machine, noise)
        policy.observe(outcome)
        played.tokens.append(int(outcome.emitted.sum()))
        played.ms.append(outcome.step_ms)
        played.drafted.append(np.bincount(outcome.proposer, outcome.drafted_k, minlength=PROPOSERS))
        played.plans.append(plan)
        for place, request in enumerate(requests):
            if request.position >= request.length:
                requests[place] = make_request(seed, number, request.tag)
                number += 1
    return played


def view_of(requests: list[Request], step_id: int, limits: EngineLimits = LIMITS) -> BatchView:
    rows = len(requests)
    context = np.array([60 + r.position for r in requests], np.int32)
    return BatchView(
        request_id=np.array([r.request_id for r in requests], np.uint64),
        task=np.array([task_id(r.tag) for r in requests], np.uint32),
        context_tokens=context,
        output_tokens=np.array([r.position for r in requests], np.int32),
        prefill_tokens=np.zeros(rows, np.int32),
        temperature=np.zeros(rows, np.float32),
        max_k=np.array([min(limits.k_max, r.length - r.position - 1) for r in requests], np.int32),
        proposer_mask=np.full(rows, limits.proposer_mask, np.uint8),
        tpot_target_ms=np.full(rows, np.nan, np.float32),
        recent_accept=np.ones(rows, np.float32),
        match_tokens=np.array([r.match[r.position] for r in requests], np.int32),
        draft_kv_lag=np.array([r.lag for r in requests], np.int32),
        seeded=np.zeros(rows, bool),
        step_id=step_id,
        running=rows,
        kv_tokens=int(context.sum()),
        bucket_edges=np.asarray(limits.bucket_edges, np.int32),
    )


def step(
    requests: list[Request],
    view: BatchView,
    plan: Plan,
    machine: Machine,
    noise: np.random.Generator,
) -> StepOutcome:
    """Advance every request as the fitted plan says, and return what the engine would report."""
    fit = fit_plan(plan, view)
    rows = len(requests)
    could = np.array(
        [
            r.holds[int(p)][r.position] if p else 0
            for r, p in zip(requests, fit.proposer, strict=True)
        ]
    )
    accepted = np.minimum(could, fit.k)
    emitted = accepted + 1
    shadow = _shadow(requests, fit.proposer, emitted)
    drafts = fit.proposer == DRAFT_MODEL
    depth = int(fit.k[drafts].max(initial=0))
    behind = sum(max(requests[row].lag - 2, 0) for row in np.flatnonzero(drafts))
    jolt = float(np.exp(noise.normal(0.0, machine.noise))) * (
        2.0 if noise.random() < machine.spikes else 1.0
    )
    one = machine.one_token_ms
    draft_ms = np.zeros(PROPOSERS)
    draft_ms[DRAFT_MODEL] = (
        jolt
        * one
        * (
            machine.draft_pass * depth
            + machine.draft_token * (float(fit.k[drafts].sum()) + 0.5 * behind)
        )
    )
    tokens = rows + int(fit.k.sum())
    edges = view.bucket_edges
    if len(edges) and tokens <= edges[-1]:
        tokens = int(edges[np.searchsorted(edges, tokens)])
    verify_ms = jolt * machine.verify_ms(tokens, view.kv_tokens)
    for row, request in enumerate(requests):
        if drafts[row]:
            request.draft_position = request.position + int(accepted[row])
        request.position += int(emitted[row])
    return StepOutcome(
        request_id=view.request_id,
        task=view.task,
        proposer=fit.proposer,
        requested_k=fit.k.astype(np.int16),
        drafted_k=fit.k.astype(np.int16),
        verified_k=fit.verify_k.astype(np.int16),
        accepted=accepted.astype(np.int16),
        emitted=emitted.astype(np.int16),
        match_tokens=view.match_tokens,
        truncated_by=np.zeros(rows, np.uint8),
        plan_source=np.ones(rows, np.uint8),
        plan_step_id=np.full(rows, plan.step_id, np.uint64),
        confidences=np.full((rows, K), np.nan, np.float32),
        shadow=shadow,
        step_id=view.step_id,
        padded_tokens=tokens,
        kv_tokens=view.kv_tokens,
        draft_ms=draft_ms,
        draft_depth=depth,
        verify_ms=verify_ms,
        step_ms=verify_ms + float(draft_ms.sum()) + machine.host_ms,
    )


def _shadow(requests: list[Request], proposer: Array, emitted: Array) -> ShadowRows:
    """Score the n-gram on what each row emitted where it matched and did not draft."""
    row = np.array(
        [i for i, r in enumerate(requests) if proposer[i] != NGRAM and r.match[r.position]],
        np.intp,
    )
    held = np.array([requests[i].holds[NGRAM][requests[i].position] for i in row], np.int64)
    matched = np.minimum(held, emitted[row])
    return ShadowRows(
        request_id=np.array([requests[i].request_id for i in row], np.uint64),
        proposer=np.full(len(row), NGRAM, np.uint8),
        offered_k=np.full(len(row), 8, np.int16),
        matched=matched.astype(np.float32),
        observed=np.minimum(matched + 1, emitted[row]).astype(np.int16),
        match_tokens=np.array([requests[i].match[requests[i].position] for i in row], np.int32),
        kind=np.zeros(len(row), np.uint8),
    )


def machine_with(**changes: float) -> Machine:
    return replace(Machine(), **changes)
