"""What a policy sees of the engine: BatchView before a step, StepOutcome after. Free of torch."""

from __future__ import annotations

import numpy as np

from parlay.engine.backend import Batch, Drafts, Verified
from parlay.engine.commit import Committed
from parlay.engine.request import Request
from parlay.engine.scheduler import Scheduler
from parlay.policies.policy import EngineLimits
from parlay.policies.types import (
    Array,
    BatchView,
    Fitted,
    Plan,
    PlanSource,
    Proposer,
    ShadowRows,
    StepOutcome,
    task_id,
)


def view_of(batch: Batch, scheduler: Scheduler, limits: EngineLimits, step_id: int) -> BatchView:
    """Return what the policy may know before step `step_id`."""
    requests, decoding = batch.requests, batch.emits & (batch.chunk == 1)
    positions = scheduler.config.positions
    return BatchView(
        request_id=np.asarray([r.request_id for r in requests], np.uint64),
        task=np.asarray([task_id(r.speculation.learned_with) for r in requests], np.uint32),
        context_tokens=np.asarray([len(r.tokens) for r in requests], np.int32),
        output_tokens=np.asarray([r.output_tokens for r in requests], np.int32),
        prefill_tokens=np.where(decoding, 0, batch.chunk).astype(np.int32),
        temperature=np.asarray([r.sampling.temperature for r in requests], np.float32),
        max_k=np.where(decoding, [_max_k(r, limits, positions) for r in requests], 0).astype(
            np.int32
        ),
        proposer_mask=np.asarray(
            [r.speculation.proposer_mask & limits.proposer_mask for r in requests], np.uint8
        ),
        tpot_target_ms=np.asarray([r.speculation.tpot_target_ms for r in requests], np.float32),
        recent_accept=np.asarray([r.recent_accept for r in requests], np.float32),
        match_tokens=batch.lookup.match_tokens,
        draft_kv_lag=np.asarray([scheduler.draft_lag(r) for r in requests], np.int32),
        seeded=np.asarray([r.sampling.seed is not None for r in requests], bool),
        step_id=step_id,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        free_blocks=scheduler.target.free,
        total_blocks=scheduler.target.total,
        kv_tokens=sum(r.computed for r in requests),
        bucket_edges=np.asarray(limits.bucket_edges, np.int32),
    )


def _max_k(request: Request, limits: EngineLimits, positions: int) -> int:
    """Return how many tokens a request may draft: k of them emit up to k + 1."""
    left = min(request.remaining, positions - len(request.tokens))
    return max(0, min(request.speculation.max_k, limits.k_max, left - 1))


def outcome_of(
    view: BatchView,
    plan: Plan | None,
    source: PlanSource,
    fit: Fitted,
    drafts: Drafts,
    verified: Verified,
    committed: Committed,
    shadow: ShadowRows,
    step_ms: float,
) -> StepOutcome:
    """Return what the step did, to be told to the policy."""
    proposer = np.where(fit.k > 0, fit.proposer, Proposer.NONE).astype(np.uint8)
    on_chain = verified.on_chain
    followed = np.where(fit.follows, int(source), int(PlanSource.DEFAULT))
    return StepOutcome(
        request_id=view.request_id,
        task=view.task,
        proposer=proposer,
        requested_k=fit.k.astype(np.int16),
        drafted_k=drafts.count.astype(np.int16),
        verified_k=_verified_k(fit, drafts),
        accepted=(verified.accepted if on_chain is None else on_chain).astype(np.int16),
        emitted=committed.emitted,
        match_tokens=view.match_tokens,
        truncated_by=committed.truncated_by,
        plan_source=followed.astype(np.uint8),
        plan_step_id=np.full(len(view), plan.step_id if plan else 0, np.uint64),
        confidences=drafts.confidences,
        shadow=shadow,
        step_id=view.step_id,
        padded_tokens=verified.padded_tokens,
        prefill_tokens=int(view.prefill_tokens.sum()),
        kv_tokens=view.kv_tokens,
        draft_ms=drafts.draft_ms,
        draft_depth=drafts.draft_depth,
        verify_ms=verified.verify_ms,
        step_ms=step_ms,
    )


def _verified_k(fit: Fitted, drafts: Drafts) -> Array:
    return np.minimum(fit.verify_k, drafts.count).astype(np.int16)
