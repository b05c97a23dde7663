"""What a step was to do, what it did, and what the policy is told of it. Free of torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from parlay.engine.plugins.fitting import every_row
from parlay.policies.types import (
    PROPOSERS,
    Array,
    BatchView,
    Fitted,
    Plan,
    PlanSource,
    ShadowRows,
    StepOutcome,
    no_shadows,
)

_DEFAULT = int(PlanSource.DEFAULT)
Counts = Array | list[int]


@dataclass(slots=True, frozen=True)
class Decision:
    """What a step is to do, by row of its view: fit.proposer, fit.k. Give it back to `observe`."""

    view: BatchView
    plan: Plan | None
    source: PlanSource
    fit: Fitted


@dataclass(slots=True)
class StepResult:
    """What a step did, by row of the decision's view; a row that did not run has zeros.

    drafted, accepted (before end or stop cropped it) and emitted tokens, as lists or arrays;
    verified, None where all that was drafted was; truncated_by as in StepOutcome; confidences
    f32 [rows, K]. draft_ms f32 [PROPOSERS], draft_depth, verify_ms and step_ms as in StepOutcome;
    padded_tokens, 0 where the pass had no rows but those of the batch; prefill_tokens, None where
    they are those of the view.
    """

    drafted: Counts
    accepted: Counts
    emitted: Counts
    verified: Counts | None = None
    truncated_by: Array | None = None
    confidences: Array | None = None
    shadow: ShadowRows = field(default_factory=no_shadows)
    draft_ms: Array | list[float] = field(default_factory=lambda: [0.0] * PROPOSERS)
    draft_depth: int = 0
    verify_ms: float = 0.0
    step_ms: float = 0.0
    padded_tokens: int = 0
    prefill_tokens: int | None = None


def outcome_of(decision: Decision, result: StepResult) -> StepOutcome:
    """Return what the policy is told of a step."""
    view, fit = decision.view, decision.fit
    drafted = np.asarray(result.drafted, np.int16)
    verified = drafted if result.verified is None else np.asarray(result.verified, np.int16)
    rows, cut, seen = len(view), result.truncated_by, result.confidences
    return StepOutcome(
        request_id=view.request_id,
        task=view.task,
        proposer=fit.proposer,
        requested_k=fit.k.astype(np.int16),
        drafted_k=drafted,
        verified_k=verified,
        accepted=np.asarray(result.accepted, np.int16),
        emitted=np.asarray(result.emitted, np.int16),
        match_tokens=view.match_tokens,
        truncated_by=_same(rows, 0) if cut is None else np.asarray(cut, np.uint8),
        plan_source=_sources(fit, int(decision.source)),
        plan_step_id=np.array([decision.plan.step_id if decision.plan else 0] * rows, np.uint64),
        confidences=_blank(rows, max([1, *drafted.tolist()])) if seen is None else seen,
        shadow=result.shadow,
        step_id=view.step_id,
        padded_tokens=result.padded_tokens
        or int(np.maximum(view.prefill_tokens, 1).sum() + verified.sum()),
        prefill_tokens=prompts_of(decision, result),
        kv_tokens=view.kv_tokens,
        draft_ms=np.asarray(result.draft_ms, np.float32),
        draft_depth=result.draft_depth,
        verify_ms=result.verify_ms,
        step_ms=result.step_ms,
    )


def prompts_of(decision: Decision, result: StepResult) -> int:
    """Return how many tokens of prompts a step computed."""
    told = result.prefill_tokens
    return int(decision.view.prefill_tokens.sum()) if told is None else told


def _sources(fit: Fitted, source: int) -> Array:
    """Return where each row's plan came from, u8 [rows]."""
    if fit.follows is every_row(len(fit.follows)):
        return _same(len(fit.follows), source)
    return np.where(fit.follows, source, _DEFAULT).astype(np.uint8)


@functools.lru_cache(maxsize=1024)
def _same(rows: int, value: int) -> Array:
    """Return one value for every row, u8 [rows], for everybody to read."""
    same = np.full(rows, value, np.uint8)
    same.flags.writeable = False
    return same


@functools.lru_cache(maxsize=256)
def _blank(rows: int, depth: int) -> Array:
    """Return confidences that nobody told, f32 [rows, depth], for everybody to read."""
    blank = np.full((rows, depth), np.nan, np.float32)
    blank.flags.writeable = False
    return blank
