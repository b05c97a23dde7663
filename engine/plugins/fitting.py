"""A plan fitted to the batch it was made for, which is most plans of a policy in the same process.

`fit_plan` looks rows up, follows matches and decides again: what a plan of this very view needs of
it is the clip. Right after a model's forward pass every call of numpy's takes some microseconds.
"""

from __future__ import annotations

import functools

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.types import NGRAM, NO_BUDGET, Array, BatchView, Fitted, Plan


def fitted(plan: Plan | None, view: BatchView) -> Fitted:
    """Return who drafts how many tokens, as `fit_plan` does; reasons are the plan's own."""
    if plan is None or plan.request_id is not view.request_id or plan.step_id != view.step_id:
        return fit_plan(plan, view)
    k = np.minimum(plan.k, view.max_k)
    k *= view.proposer_mask >> plan.proposer & 1
    k[(plan.proposer == NGRAM) & (view.match_tokens <= 0)] = 0
    budgeted = plan.budget_tokens != NO_BUDGET and k.sum() > plan.budget_tokens
    if budgeted or len(view.bucket_edges):
        return fit_plan(plan, view)
    k *= plan.proposer > 0
    return Fitted(
        proposer=plan.proposer * (k > 0),
        k=k,
        verify_k=k,
        follows=every_row(len(k)),
        shadow=plan.shadow,
        propensity=plan.propensity,
        reason=plan.reason,
    )


@functools.lru_cache(maxsize=256)
def every_row(rows: int) -> Array:
    """Return bool [rows], all true, for everybody to read."""
    every = np.ones(rows, bool)
    every.flags.writeable = False
    return every


def draft_all(fit: Fitted, k: Array, column: int) -> None:
    """Let `column` draft and verify k i32 [rows], whatever `fit` says so far."""
    fit.k, fit.verify_k = k, k.copy()
    fit.proposer = np.where(k > 0, column, 0).astype(np.uint8)
