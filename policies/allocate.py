"""Fit a plan to the batch that is really there: budgets, prices, clips. Pure; runs every step.

A plan may be some steps old: requests have joined or left and n-gram matches have grown or broken.
`fit_plan` looks rows up by request, follows the match length of now, and never lets what a row
drafts depend on a token that has been drawn (the budget is the plan's; confidences only rank).
"""

from __future__ import annotations

import numpy as np

from parlay.policies.calibration import calibrated
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    NO_BUDGET,
    NONE,
    PROPOSERS,
    Array,
    BatchView,
    Fitted,
    Plan,
    Reason,
    match_bucket,
)

HAZARD_CEILING = 0.98
"""No estimate of a rejection's probability is above this: a proposer can always come back."""
_SAME = 1e-5
_LEAST_MS = 1e-9
_PROPOSER = np.arange(PROPOSERS, dtype=np.uint8)
_TRIES = (int(Reason.EXPLORE), int(Reason.WARM_UP))
_BEST, _NO_GAIN = int(Reason.BEST_GOODPUT), int(Reason.NO_GAIN)
_NO_MATCH, _NOT_ALLOWED = int(Reason.NO_MATCH), int(Reason.NOT_ALLOWED)


def fit_plan(
    plan: Plan | None,
    view: BatchView,
    drafted: Array | None = None,
    confidences: Array | None = None,
) -> Fitted:
    """Return what each row of `view` drafts and verifies under `plan`; None speculates nowhere.

    Before drafting, without `drafted`, verify_k is k as far as the budget goes. After drafting,
    `drafted` i32 [rows] and `confidences` f32 [rows, K] decide verify_k: all that was drafted,
    unless the plan's budget binds; then the tokens with the largest product of calibrated
    confidences up to their own place, each made before its token was drawn. A plan may draft more
    than its budget for that. proposer, k and the rest are the same in both calls.
    """
    rows = len(view)
    if plan is None or rows == 0:
        return _nothing(rows)
    index, follows = _rows_in(plan, view)
    fit = _as_planned(plan, view, index, follows)
    survival = _survival_now(plan, view, index) if len(plan) else None
    if survival is not None and np.isfinite(plan.token_value_ms):
        _decide_again(plan, view, index, fit, survival)
    _clip(view, fit)
    chosen = fit.survival = None if survival is None else _of_chosen(survival, fit)
    if chosen is not None and len(view.bucket_edges):
        _fill_bucket(plan, view, fit, chosen)
    if plan.budget_tokens != NO_BUDGET and fit.k.sum() > plan.budget_tokens:
        # What a plan drafts beyond its own budget is there for the confidences to choose from.
        fit.k = keep_top(chosen, fit.k, max(plan.budget_tokens, int(plan.k.sum())))
    fit.proposer[fit.k == 0] = NONE
    fit.verify_k = verify_plan(plan, fit, fit.k if drafted is None else drafted, confidences)
    return fit


def keep_top(survival: Array | None, k: Array, budget: int) -> Array:
    """Return k i32 [rows] cut to `budget` tokens in all, those with the largest survival.

    Ties go to the earlier place, then the earlier row; survival None ties everywhere. Each row
    keeps a prefix, because survival [rows, K] falls along a row.
    """
    rows, depth = len(k), int(k.max(initial=0))
    if budget <= 0 or depth == 0:
        return np.zeros(rows, np.int32)
    value = np.ones((rows, depth)) if survival is None else np.maximum(survival[:, :depth], 0.0)
    # What makes no sense comes last of what may be kept, never behind what may not.
    value = np.where(np.arange(depth) < k[:, None], np.nan_to_num(value), -1.0)
    order = np.argsort(-value.T.ravel(), kind="stable")[: min(budget, int(k.sum()))]
    return np.bincount(order % rows, minlength=rows).astype(np.int32)


def _nothing(rows: int) -> Fitted:
    return Fitted(
        proposer=np.zeros(rows, np.uint8),
        k=np.zeros(rows, np.int32),
        verify_k=np.zeros(rows, np.int32),
        follows=np.zeros(rows, bool),
        shadow=np.zeros(rows, bool),
        propensity=np.ones(rows, np.float32),
        reason=np.zeros(rows, np.uint8),
    )


def _rows_in(plan: Plan, view: BatchView) -> tuple[Array, Array]:
    """Return each view row's index in the plan, and whether it is there (else the index is 0)."""
    rows = len(view)
    if len(plan) == rows and np.array_equal(plan.request_id, view.request_id):
        return np.arange(rows), np.ones(rows, bool)
    if len(plan) == 0:
        return np.zeros(rows, np.intp), np.zeros(rows, bool)
    order = np.argsort(plan.request_id)
    place = np.searchsorted(plan.request_id, view.request_id, sorter=order)
    index = order[np.minimum(place, len(plan) - 1)]
    follows = plan.request_id[index] == view.request_id
    return np.where(follows, index, 0), follows


def _as_planned(plan: Plan, view: BatchView, index: Array, follows: Array) -> Fitted:
    if len(plan) == len(view) and follows.all():
        return Fitted(
            proposer=np.where(plan.proposer[index] < PROPOSERS, plan.proposer[index], NONE),
            k=plan.k[index].astype(np.int32),
            verify_k=np.zeros(len(view), np.int32),
            follows=follows,
            shadow=plan.shadow[index],
            propensity=plan.propensity[index],
            reason=plan.reason[index],
        )
    fit = _nothing(len(view))
    fit.follows = follows
    if len(plan):
        fit.proposer = np.where(follows, plan.proposer[index], 0).astype(np.uint8)
        fit.k = np.where(follows, plan.k[index], 0).astype(np.int32)
        fit.shadow = follows & plan.shadow[index]
        fit.propensity = np.where(follows, plan.propensity[index], 1.0).astype(np.float32)
        fit.reason = np.where(follows, plan.reason[index], 0).astype(np.uint8)
    if plan.defaults is not None and len(plan.defaults.task) and not follows.all():
        new = np.flatnonzero(~follows)
        tasks = plan.defaults.task
        same = view.task[new][:, None] == tasks
        same |= (tasks == 0) & ~same.any(axis=1, keepdims=True)
        found = same.any(axis=1)
        row = same.argmax(axis=1)[found]
        fit.proposer[new[found]] = plan.defaults.proposer[row]
        fit.k[new[found]] = plan.defaults.k[row]
    fit.proposer[fit.proposer >= PROPOSERS] = NONE
    return fit


def _survival_now(plan: Plan, view: BatchView, index: Array) -> Array | None:
    """Return f32 [rows, PROPOSERS, K] with the n-gram's column for the match lengths of now."""
    if plan.survival is None:
        return None
    survival: Array = plan.survival[index]
    if plan.match_hazard is not None and plan.match_frailty is not None:
        hazard = plan.match_hazard[match_bucket(view.match_tokens)]
        survival[:, NGRAM] = ngram_survival(hazard, plan.match_frailty[index], view.match_tokens)
    return survival


def ngram_survival(hazard: Array, frailty: Array, match_tokens: Array) -> Array:
    """Return f32 [rows, K]: P(first j n-gram tokens hold), 0 without a match; hazard [rows, K]."""
    reject = np.minimum(hazard * frailty[:, None], HAZARD_CEILING)
    survival: Array = np.cumprod(1.0 - reject, axis=1) * (match_tokens > 0)[:, None]
    return survival.astype(np.float32)


def _decide_again(plan: Plan, view: BatchView, index: Array, fit: Fitted, survival: Array) -> None:
    """Choose proposer and k at the plan's prices for rows whose match is not what it was.

    Passes of a drafting model are shared by the batch: a row joins them only as deep as others go.
    """
    assert plan.survival is not None
    now, before = survival[:, NGRAM, 0], plan.survival[index, NGRAM, 0]
    changed = (np.abs(now - before) > _SAME) & fit.follows
    if not changed.any():
        return
    row = (changed & (fit.reason != _TRIES[0]) & (fit.reason != _TRIES[1])).nonzero()[0]
    depth = np.full(PROPOSERS, survival.shape[2])
    for proposer in (DRAFT_MODEL, MEDUSA):
        depth[proposer] = fit.k.max(initial=0, where=fit.proposer == proposer)
    if len(view) > 1 and (lookups := plan.k[plan.proposer == NGRAM]).any():
        depth[NGRAM] = lookups.max()  # a longer row would pad all the others
    limit = np.minimum(depth, view.max_k[row, None])
    limit *= (view.proposer_mask[row, None] >> _PROPOSER) & 1
    within = np.arange(survival.shape[2]) < limit[:, :, None]
    price = plan.marginal_token_price_ms + plan.draft_token_price_ms
    value = survival[row] * plan.token_value_ms
    worth = (value >= np.maximum(price, _LEAST_MS)[:, None]) & within
    best = np.where(worth, value - price[:, None], 0.0).sum(axis=2).argmax(axis=1)
    fit.proposer[row] = best
    fit.k[row] = k = worth[np.arange(len(row)), best].sum(axis=1)
    fit.reason[row] = np.where(k > 0, _BEST, _NO_GAIN)


def _clip(view: BatchView, fit: Fitted) -> None:
    """Take back what a row may not or cannot draft."""
    no_match = (fit.proposer == NGRAM) & (view.match_tokens <= 0)
    barred = ((view.proposer_mask >> fit.proposer) & 1) == 0
    barred |= (view.prefill_tokens > 0) | (fit.proposer == NONE)
    lost = (fit.k > 0) & (no_match | barred)
    fit.k = np.where(no_match | barred, 0, np.clip(fit.k, 0, view.max_k)).astype(np.int32)
    if lost.any():
        fit.reason[lost] = np.where(no_match[lost], _NO_MATCH, _NOT_ALLOWED)


def _of_chosen(survival: Array, fit: Fitted) -> Array:
    """Return [rows, K]: the survival of each row's own proposer, the last repeated up to its k."""
    chosen: Array = survival[np.arange(len(fit.k)), fit.proposer]
    beyond = int(fit.k.max(initial=0)) - chosen.shape[1]
    return chosen if beyond <= 0 else np.pad(chosen, ((0, 0), (0, beyond)), "edge")


def _fill_bucket(plan: Plan, view: BatchView, fit: Fitted, survival: Array) -> None:
    """Draft deeper up to the step's padded size, where a token costs its drafting only."""
    total = int(np.where(view.prefill_tokens > 0, view.prefill_tokens, 1).sum() + fit.k.sum())
    edge = int(np.searchsorted(view.bucket_edges, total))
    if not fit.k.any() or edge == len(view.bucket_edges):
        return
    room = int(view.bucket_edges[edge]) - total
    if plan.budget_tokens != NO_BUDGET:
        room = min(room, plan.budget_tokens - int(fit.k.sum()))
    if room <= 0:
        return
    shared = np.isin(fit.proposer, (DRAFT_MODEL, MEDUSA))
    deepest = np.where(shared, fit.k[shared].max(initial=0), survival.shape[1])
    limit = np.where(fit.k > 0, np.minimum(deepest, view.max_k), 0)
    price = np.nan_to_num(plan.draft_token_price_ms)[fit.proposer][:, None]
    value = 1.0 if np.isnan(plan.token_value_ms) else plan.token_value_ms
    worth = (survival > 0.0) & (survival * value >= price)
    deeper = np.maximum(np.minimum(limit, worth.sum(axis=1)), fit.k)
    new = np.where(np.arange(survival.shape[1]) < fit.k[:, None], 2.0, survival)
    fit.k = keep_top(new, deeper, int(fit.k.sum()) + room)


def verify_plan(plan: Plan, fit: Fitted, drafted: Array, confidences: Array | None = None) -> Array:
    """Return the verify_k i32 [rows] of `fit_plan` after drafting, for a fit that it returned."""
    drafted = np.asarray(drafted, np.int32)
    if plan.budget_tokens == NO_BUDGET or drafted.sum() <= plan.budget_tokens:
        return drafted.copy()
    depth, survival = int(drafted.max()), fit.survival
    planned = np.ones((len(drafted), depth))
    if survival is not None:
        reach = min(depth, survival.shape[1])
        planned[:, :reach] = survival[:, :reach]
        planned[:, reach:] = planned[:, reach - 1 : reach]
    if confidences is None:
        return keep_top(planned, drafted, plan.budget_tokens)
    before = np.concatenate([np.ones((len(drafted), 1)), planned[:, :-1]], axis=1)
    # At most 1: were a row to rise, a later confidence could admit an earlier token.
    step = np.divide(planned, before, out=np.ones_like(planned), where=before > planned)
    seen = np.full((len(drafted), depth), np.nan)
    seen[:, : confidences.shape[1]] = confidences[:, :depth]
    seen = chances(plan, fit.proposer, seen)
    step = np.where(np.isnan(seen), step, seen)
    return keep_top(np.cumprod(step, axis=1), drafted, plan.budget_tokens)


def weighs_drafts(plan: Plan, fit: Fitted) -> bool:
    """Say whether `verify_plan` may leave out some of what `fit` drafts, by its confidences."""
    return plan.budget_tokens != NO_BUDGET and int(fit.k.sum()) > plan.budget_tokens


def chances(plan: Plan, proposer: Array, confidence: Array) -> Array:
    """Return confidences [rows, K] as acceptance probabilities in [0, 1]; nan stays nan."""
    if plan.calibration is None:
        return np.clip(confidence, 0.0, 1.0)
    line = plan.calibration[proposer]
    if line.ndim == 3:  # a line a place, the last of which goes for all that follow
        line = line[:, :, np.minimum(np.arange(confidence.shape[1]), line.shape[2] - 1)]
        return calibrated(confidence, line[:, 0], line[:, 1])
    slope, offset = line.T[:, :, None]
    return calibrated(confidence, slope, offset)
