"""The plan with the most emitted tokens per millisecond, for given survivals and step costs.

Maximises (emits + sum of survivals) / step time over who drafts, how deep the shared passes of the
draft model go, and how many tokens are verified. For fixed proposers it is exact: every depth and
every verify budget is enumerated on sorted survivals, and Dinkelbach's iteration turns the ratio
into a difference. Choosing proposers as well is a multiple-choice knapsack, solved at a marginal
price; tests/unit/policies/test_solver.py measures the gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, PROPOSERS, Array, BatchView

_FLAT = (NGRAM, MEDUSA)
_BARRED = -1e30
_ROUNDS = 6
_SCARCE = 0.5
DWELL_STEPS = 16
"""Steps over which a request's draft KV, once caught up, is thought to serve."""
_CLOSE = 1e-5
"""Relative; the error of a plan goes with its square."""


@dataclass(slots=True, frozen=True)
class StepCosts:
    """What a step may cost.

    verify_ms f64 [B + 1]: the step without drafting when b drafted tokens are verified, rising,
    padded and with overhead; its length caps the budget. pass_ms: one pass of the draft model over
    the batch. token_ms f64 [PROPOSERS]: each drafted token on top. switch_ms f64 [rows]: what
    letting the draft model draft a row costs at once (KV to catch up), spread over DWELL_STEPS.
    pad_ms: each token by which a row is shorter than the longest, where rows are padded to it.
    """

    verify_ms: Array
    pass_ms: float
    token_ms: Array
    switch_ms: Array
    pad_ms: float = 0.0


@dataclass(slots=True, frozen=True)
class Allocation:
    """Per row proposer u8 and k i32; depth, passes of the draft model; what the step should do.

    price_ms: net value of the last token worth drafting, between the worst one in and the best one
    out.
    """

    proposer: Array
    k: Array
    depth: int
    emitted_tokens: float
    step_ms: float
    price_ms: float

    @property
    def ms_per_token(self) -> float:
        """Return what an emitted token costs under this plan."""
        return self.step_ms / self.emitted_tokens


def usable(view: BatchView, survival: Array) -> Array:
    """Return survival f64 with zeros wherever a row may not draft in this step."""
    bits = (view.proposer_mask[:, None] >> np.arange(PROPOSERS)) & 1
    limit = np.where(view.prefill_tokens > 0, 0, view.max_k)[:, None] * bits
    return np.where(np.arange(survival.shape[2]) < limit[:, :, None], survival, 0.0).astype(float)


def no_speculation(rows: int, emits: float, costs: StepCosts) -> Allocation:
    """Return the plan that drafts nothing."""
    price = float(costs.verify_ms[min(1, len(costs.verify_ms) - 1)] - costs.verify_ms[0])
    zeros = np.zeros(rows, np.int32)
    return Allocation(zeros.astype(np.uint8), zeros, 0, emits, float(costs.verify_ms[0]), price)


def best_plan(
    survival: Array, costs: StepCosts, emits: float, ms_per_token: float | None = None
) -> Allocation:
    """Return the best plan for survival f64 [rows, PROPOSERS, K], 0 wherever a row may not draft.

    emits: tokens the step yields without drafts. ms_per_token: a first guess, which only saves
    time. Where rows are padded to the longest, smaller depths are tried too, each half the last.
    """
    best = _best_of_any_depth(survival, costs, emits, ms_per_token)
    cap = int(best.k.max(initial=0)) // 2
    while costs.pad_ms > 0.0 and cap > 0:
        reachable = np.arange(survival.shape[2]) < cap
        found = _best_of_any_depth(survival * reachable, costs, emits, best.ms_per_token)
        if found.ms_per_token < best.ms_per_token:
            best = found
        cap //= 2
    return best


def best_plan_at(
    survival: Array, costs: StepCosts, emits: float, token_value_ms: float
) -> Allocation:
    """Return the plan with the largest token_value_ms * emitted tokens - step time.

    With 1 / the long-run goodput as value this is the plan of the best average over steps that
    differ; `best_plan` is best for a step that repeats for ever.
    """
    best = no_speculation(len(survival), emits, costs)
    many = min(len(costs.verify_ms) - 1, 2 * len(survival))
    price = float(costs.verify_ms[many] - costs.verify_ms[0]) / max(many, 1)
    for _ in range(_ROUNDS):
        found = _best_at(survival, costs, emits, token_value_ms, price)
        if _worth(found, token_value_ms) > _worth(best, token_value_ms):
            best = found
        last, price = price, _slope(costs.verify_ms, found)
        if abs(price - last) <= _CLOSE * max(last, _CLOSE):
            break
    return best


def _worth(plan: Allocation, token_value_ms: float) -> float:
    return token_value_ms * plan.emitted_tokens - plan.step_ms


def _best_of_any_depth(
    survival: Array, costs: StepCosts, emits: float, ms_per_token: float | None
) -> Allocation:
    best = none = no_speculation(len(survival), emits, costs)
    value = ms_per_token or none.ms_per_token
    many = min(len(costs.verify_ms) - 1, 2 * len(survival))
    price = float(costs.verify_ms[many] - costs.verify_ms[0]) / max(many, 1)
    for _ in range(_ROUNDS):
        found = _best_at(survival, costs, emits, value, price)
        if found.ms_per_token < best.ms_per_token:
            best = found
        price, last, value = _slope(costs.verify_ms, found), value, best.ms_per_token
        if abs(value - last) <= _CLOSE * last:
            break
    if int(best.k.sum()) == len(costs.verify_ms) - 1:
        # The budget binds, and no slope shows what a place in it is worth: half a token, say.
        found = _best_at(survival, costs, emits, value, _SCARCE * value)
        best = min(best, found, key=lambda plan: plan.ms_per_token)
    return best


def _slope(verify_ms: Array, found: Allocation) -> float:
    """Return ms per verified token around a plan's budget, over a window that spans steps."""
    budget = int(found.k.sum())
    reach = max(2, len(found.k) // 2)
    low, high = max(budget - reach, 0), min(budget + reach, len(verify_ms) - 1)
    return float(verify_ms[high] - verify_ms[low]) / max(high - low, 1)


def _best_at(
    survival: Array, costs: StepCosts, emits: float, value: float, price: float
) -> Allocation:
    """Return the plan with the largest value * emitted - step time at one token value."""
    rows = len(survival)
    gain = value * survival - costs.token_ms[:, None]
    useful = gain > 0.0
    reach = max(int(useful.any(axis=(0, 1)).sum()), 1)
    depths = int(useful[:, DRAFT_MODEL].any(axis=0).sum()) + 1
    gain = gain[:, :, :reach]
    worth = np.maximum(gain - price, 0.0).cumsum(axis=2)
    flat, flat_worth = _best_flat(worth)
    flat_gain = gain[np.arange(rows), flat]
    use = np.zeros((depths, rows), bool)
    draft_worth = worth[:, DRAFT_MODEL, : depths - 1] - costs.switch_ms[:, None]
    nothing_else = (survival[np.arange(rows), flat, 0] <= 0.0) & (costs.switch_ms <= 0.0)
    use[1:] = (flat_worth < draft_worth.T) | nothing_else
    within = np.arange(reach) < np.arange(depths)[:, None]
    draft_gain = np.where(within[:, None, :], gain[None, :, DRAFT_MODEL], _BARRED)
    net = np.where(use[:, :, None], draft_gain, flat_gain).reshape(depths, rows * reach)
    ranked = -np.sort(-net, axis=1)[:, : len(costs.verify_ms) - 1]
    score = -np.repeat(costs.verify_ms[None, : ranked.shape[1] + 1], depths, axis=0)
    score[:, 1:] += ranked.cumsum(axis=1)
    score -= (np.arange(depths) * costs.pass_ms + use @ costs.switch_ms)[:, None]
    depth, budget = divmod(int(score.argmax()), score.shape[1])
    taken = np.argsort(-net[depth], kind="stable")[:budget]
    k = np.bincount(taken // reach, minlength=rows).astype(np.int32)
    proposer = np.where(k > 0, np.where(use[depth], DRAFT_MODEL, flat), 0).astype(np.uint8)
    inside = float(ranked[depth, budget - 1]) if budget else np.inf
    outside = float(ranked[depth, budget]) if budget < ranked.shape[1] else -np.inf
    cut = min(max(price, np.nextafter(outside, np.inf)), inside)
    return priced(survival, costs, emits, proposer, k, max(cut, 0.0))


def _best_flat(worth: Array) -> tuple[Array, Array]:
    """Return per row the better of the proposers that need no passes, and what it is worth."""
    total = worth[:, _FLAT, -1]
    best = total.argmax(axis=1)
    return np.asarray(_FLAT)[best], total[np.arange(len(total)), best]


def priced(
    survival: Array, costs: StepCosts, emits: float, proposer: Array, k: Array, price: float
) -> Allocation:
    """Return the plan with its tokens and time as they really add up."""
    row = np.arange(len(k))
    taken = np.arange(survival.shape[2]) < k[:, None]
    tokens = emits + float((survival[row, proposer] * taken).sum())
    drafts = proposer == DRAFT_MODEL
    depth = int(k[drafts].max(initial=0))
    per_token = float((costs.token_ms[proposer] * k).sum())
    ms = float(costs.verify_ms[int(k.sum())]) + depth * costs.pass_ms + per_token
    ms += float(costs.switch_ms[drafts].sum())
    ms += costs.pad_ms * (emits * int(k.max(initial=0)) - float(k.sum()))
    return Allocation(proposer, k, depth, tokens, ms, price)
