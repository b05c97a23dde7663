"""The plan with the most emitted tokens per millisecond, for given survivals and step costs.

Maximises (emits + sum of survivals) / step time over who drafts, how deep the shared passes of the
draft model go, and how many tokens are verified. For fixed proposers it is exact: every depth and
every verify budget is enumerated on sorted survivals, and Dinkelbach's iteration turns the ratio
into a difference. Choosing proposers as well is a multiple-choice knapsack, solved at a marginal
price; tests/unit/policies/test_solver.py measures the gap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parlay.policies.types import (
    DRAFT_MODEL,
    K_LIMIT,
    MEDUSA,
    NGRAM,
    NONE,
    PROPOSERS,
    Array,
    BatchView,
)

_BARRED = -1e30
_COLUMNS = np.arange(PROPOSERS, dtype=np.uint8)[:, None]
_DEPTHS = np.arange(K_LIMIT + 1, dtype=np.int32)
_UP_TO = np.tri(K_LIMIT + 1, K_LIMIT, -1)
"""Sums up to each depth: a product is faster than running sums down many short columns."""
_ROUNDS = 6
_SCARCE = 0.5
DWELL_STEPS = 16
"""Steps over which a request's draft KV, once caught up, is thought to serve."""
_CLOSE = 1e-3
"""Relative; the error of a plan goes with its square."""
_ROUNDING = 1e-9


@dataclass(slots=True, frozen=True)
class StepCosts:
    """What a step may cost.

    verify_ms f64 [B + 1]: the step without drafting when b drafted tokens are verified, rising,
    padded and with overhead; its length caps the budget. pass_ms: one pass of the draft model over
    the batch. token_ms f64 [PROPOSERS]: each drafted token on top. switch_ms f64 [rows]: what
    letting the draft model draft a row costs at once (KV to catch up), spread over DWELL_STEPS.
    pad_ms: each token by which a row is shorter than the longest, where rows are padded to it.
    heads_ms: one pass of Medusa's heads, where any row drafts by them.
    """

    verify_ms: Array
    pass_ms: float
    token_ms: Array
    switch_ms: Array
    pad_ms: float = 0.0
    heads_ms: float = 0.0


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


def usable(view: BatchView, survival: Array, only: int | None = None) -> Array:
    """Return survival f64 with zeros wherever a row may not draft in this step.

    only: survival is of one proposer, [rows, 1, K].
    """
    if len(view) == 1 and only is None:
        return _usable_of_one(view, survival)
    allowed = (view.proposer_mask >> _COLUMNS) & 1
    limit = allowed * np.where(view.prefill_tokens > 0, 0, view.max_k)
    there = slice(NGRAM, PROPOSERS if allowed[MEDUSA].any() else MEDUSA)
    if only is not None:
        limit, there = limit[only : only + 1], slice(0, 1)
    reach = _DEPTHS[: survival.shape[2], None] < limit[there, None]
    found = np.zeros(survival.shape[1:] + survival.shape[:1])
    np.multiply(survival.transpose(1, 2, 0)[there], reach, out=found[there])
    return found.transpose(2, 0, 1)


def _usable_of_one(view: BatchView, survival: Array) -> Array:
    """Do what `usable` does for a batch of one, whose arrays would be mostly overhead."""
    found, allowed = survival.astype(float), int(view.proposer_mask[0])
    found[:, :, 0 if view.prefill_tokens[0] > 0 else max(int(view.max_k[0]), 0) :] = 0.0
    for proposer in range(PROPOSERS):
        if not (allowed >> proposer) & 1:
            found[0, proposer] = 0.0
    return found


def no_speculation(rows: int, emits: float, costs: StepCosts) -> Allocation:
    """Return the plan that drafts nothing.

    Its price is for the steps after this one, which may have room where this one has none.
    """
    if len(costs.verify_ms) > 1:
        # Not of the first token alone, which is cheap where prices of drafting are bounded below.
        price = _first_price(costs.verify_ms, rows)
    else:
        price = _SCARCE * float(costs.verify_ms[0]) / emits
    zeros = np.zeros(rows, np.int32)
    return Allocation(zeros.astype(np.uint8), zeros, 0, emits, float(costs.verify_ms[0]), price)


def best_plan(
    survival: Array, costs: StepCosts, emits: float, ms_per_token: float | None = None
) -> Allocation:
    """Return the best plan for survival f64 [rows, PROPOSERS, K], 0 wherever a row may not draft.

    emits: tokens the step yields without drafts. ms_per_token: a first guess, which only saves
    time. Where rows are padded to the longest, smaller depths are tried too, each half the last.
    """
    if len(survival) == 1:
        return _best_for_one(survival[0], costs, emits)
    batch = _batch(survival, costs, emits)
    best = _best_of_any_cap(batch, ms_per_token)
    if batch.heads and costs.heads_ms > 0.0:
        # Their pass is paid once for all rows: whether it is worth it no row can tell.
        found = _best_of_any_cap(_headless(batch), best.ms_per_token)
        best = min(best, found, key=lambda plan: plan.ms_per_token)
    return best


def _best_of_any_cap(batch: _Batch, ms_per_token: float | None) -> Allocation:
    best = _best_of_any_depth(batch, ms_per_token)
    cap = int(best.k.max(initial=0)) // 2
    while batch.costs.pad_ms > 0.0 and cap > 0:
        found = _best_of_any_depth(
            replace(batch, survival=batch.survival[:, :cap]), best.ms_per_token
        )
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
    batch = _batch(survival, costs, emits)
    best = _best_of_any_price(batch, token_value_ms)
    if batch.heads and costs.heads_ms > 0.0:
        found = _best_of_any_price(_headless(batch), token_value_ms)
        best = max(best, found, key=lambda plan: _worth(plan, token_value_ms))
    return best


def _best_of_any_price(batch: _Batch, token_value_ms: float) -> Allocation:
    costs = batch.costs
    best = no_speculation(batch.rows, batch.emits, costs)
    price = _first_price(costs.verify_ms, batch.rows)
    for _ in range(_ROUNDS):
        found = _best_at(batch, token_value_ms, price)
        if _worth(found, token_value_ms) > _worth(best, token_value_ms):
            best = found
        last, price = price, _slope(costs.verify_ms, int(found.k.sum()), batch.rows)
        if abs(price - last) <= _CLOSE * max(last, _CLOSE):
            break
    return best


def _worth(plan: Allocation, token_value_ms: float) -> float:
    return token_value_ms * plan.emitted_tokens - plan.step_ms


@dataclass(slots=True, frozen=True)
class _Batch:
    """What is planned for, places before rows: numpy is fastest where the long axis is the last.

    survival f64 [PROPOSERS, K, rows], Medusa's left out unless heads: it is there; totals f64
    [PROPOSERS, K + 1, rows]: tokens expected of a row's first k drafts; current bool [rows]:
    nothing to catch up; emits: tokens without drafts.
    """

    survival: Array
    totals: Array
    current: Array
    heads: bool
    costs: StepCosts
    emits: float

    @property
    def rows(self) -> int:
        return int(self.survival.shape[2])


def _batch(survival: Array, costs: StepCosts, emits: float) -> _Batch:
    survival = np.ascontiguousarray(survival.transpose(1, 2, 0))
    heads = bool(survival[MEDUSA].any())
    _, k_max, rows = survival.shape
    there = slice(NGRAM, PROPOSERS if heads else MEDUSA)
    totals = np.zeros((PROPOSERS, k_max + 1, rows))
    np.matmul(_UP_TO[: k_max + 1, :k_max], survival[there], out=totals[there])
    return _Batch(survival[: there.stop], totals, costs.switch_ms <= 0.0, heads, costs, emits)


def _headless(batch: _Batch) -> _Batch:
    """Return the batch as if Medusa were not there."""
    return replace(batch, survival=batch.survival[:MEDUSA], heads=False)


def _best_for_one(survival: Array, costs: StepCosts, emits: float) -> Allocation:
    """Return the best plan of one row, survival [PROPOSERS, K], where all are soon compared."""
    survival = survival[:, : len(costs.verify_ms) - 1]
    depth = _DEPTHS[1 : survival.shape[1] + 1]
    tokens = survival.cumsum(axis=1) + emits
    ms = costs.token_ms[:, None] * depth
    ms += costs.verify_ms[1 : len(depth) + 1] + costs.pad_ms * (emits - 1.0) * depth
    ms[DRAFT_MODEL] += costs.pass_ms * depth + costs.switch_ms
    ms[MEDUSA] += costs.heads_ms
    per_token = ms / tokens
    best = int(per_token.argmin()) if per_token.size else 0
    if not per_token.size or per_token.flat[best] >= costs.verify_ms[0] / emits:
        return no_speculation(1, emits, costs)
    proposer, place = divmod(best, len(depth))
    drafts = proposer == DRAFT_MODEL
    # A deeper place of the draft model takes another pass: it is no part of this choice.
    places = survival[proposer, : place + 1 if drafts else None]
    ranked = per_token[proposer, place] * places - costs.token_ms[proposer]
    return Allocation(
        proposer=np.array([proposer], np.uint8),
        k=np.array([place + 1], np.int32),
        depth=place + 1 if drafts else 0,
        emitted_tokens=float(tokens[proposer, place]),
        step_ms=float(ms[proposer, place]),
        price_ms=_cut(ranked, place + 1, _first_price(costs.verify_ms, 1)),
    )


def _best_of_any_depth(batch: _Batch, ms_per_token: float | None) -> Allocation:
    costs = batch.costs
    best = none = no_speculation(batch.rows, batch.emits, costs)
    value = ms_per_token or none.ms_per_token
    price = _first_price(costs.verify_ms, batch.rows)
    for _ in range(_ROUNDS):
        found = _best_at(batch, value, price)
        if found.ms_per_token < best.ms_per_token:
            best = found
        price, last, value = (
            _slope(costs.verify_ms, int(found.k.sum()), batch.rows),
            value,
            best.ms_per_token,
        )
        if abs(value - last) <= _CLOSE * last:
            break
    if int(best.k.sum()) == len(costs.verify_ms) - 1:
        # The budget binds, and no slope shows what a place in it is worth: half a token, say.
        found = _best_at(batch, value, _SCARCE * value)
        best = min(best, found, key=lambda plan: plan.ms_per_token)
    return best


def _first_price(verify_ms: Array, rows: int) -> float:
    """Return ms per verified token over the first two of each row."""
    many = min(len(verify_ms) - 1, 2 * rows)
    return float(verify_ms[many] - verify_ms[0]) / max(many, 1)


def _slope(verify_ms: Array, budget: int, rows: int) -> float:
    """Return ms per verified token around a budget, over a window that spans steps."""
    reach = max(2, rows // 2)
    low, high = max(budget - reach, 0), min(budget + reach, len(verify_ms) - 1)
    return float(verify_ms[high] - verify_ms[low]) / max(high - low, 1)


def _best_at(batch: _Batch, value: float, price: float) -> Allocation:
    """Return the plan with the largest value * emitted - step time at one token value.

    Each row has the better of the proposers that need no passes, or else the draft model, by what
    their tokens are worth at `price`; every depth of the latter is tried that may be the best.
    """
    costs, survival = batch.costs, batch.survival
    depths = survival.shape[1] + 1
    gain = value * survival
    gain -= costs.token_ms[: len(gain), None, None]
    worth = gain[NGRAM:] - price
    np.maximum(worth, 0.0, out=worth)
    flat, flat_gain, flat_worth = _best_flat(gain, worth, batch.heads)
    draft_worth = _UP_TO[:depths, : depths - 1] @ worth[DRAFT_MODEL - NGRAM] - costs.switch_ms
    first = survival[flat, 0, np.arange(batch.rows)] if batch.heads else survival[NGRAM, 0]
    use = (flat_worth < draft_worth) | ((first <= 0.0) & batch.current)
    # No budget does better than all tokens that are worth more than a price, each at that price.
    bound = np.maximum(flat_worth, draft_worth).sum(axis=1) - _DEPTHS[:depths] * costs.pass_ms
    # Nor is any larger than there are tokens that gain.
    most = min(int(np.count_nonzero(gain[NGRAM:] > 0.0)) + 1, len(costs.verify_ms))
    bound += (price * np.arange(most) - costs.verify_ms[:most]).max()
    some = use.any(axis=1)
    best = -np.inf, 0
    for depth in np.argsort(-bound, kind="stable").tolist():
        if bound[depth] < best[0] - _ROUNDING * costs.verify_ms[-1]:
            break
        if depth and not some[depth]:
            continue  # passes that nobody drafts in: no depth does as well
        net = np.where(use[depth], gain[DRAFT_MODEL], flat_gain)
        np.copyto(net[depth:], _BARRED, where=use[depth])
        ranked, budget, score = _best_budget(net, costs.verify_ms)
        score -= depth * costs.pass_ms + float(use[depth] @ costs.switch_ms)
        if (score, -depth) > best:
            best, found = (score, -depth), (net, ranked, budget)
    net, ranked, budget = found
    if not budget:
        none = no_speculation(batch.rows, batch.emits, costs)
        return replace(none, price_ms=_cut(ranked, 0, price))
    k = _first(net, ranked[budget - 1], budget)
    chosen = np.where(use[-best[1]], DRAFT_MODEL, flat)
    return _priced(
        batch, np.where(k > 0, chosen, NONE).astype(np.uint8), k, _cut(ranked, budget, price)
    )


def _best_flat(gain: Array, worth: Array, heads: bool) -> tuple[Array, Array, Array]:
    """Return each row's better of the proposers that need no passes, gains and their worth.

    worth [PROPOSERS - 1, K, rows]: from the n-gram on.
    """
    lookup = worth[0].sum(axis=0)
    if not heads:
        return np.asarray(NGRAM), gain[NGRAM], lookup
    by_heads = (medusa := worth[MEDUSA - NGRAM].sum(axis=0)) > lookup
    flat_gain = np.where(by_heads, gain[MEDUSA], gain[NGRAM])
    return np.where(by_heads, MEDUSA, NGRAM), flat_gain, np.maximum(lookup, medusa)


def _best_budget(net: Array, verify_ms: Array) -> tuple[Array, int, float]:
    """Return the gains above 0, falling, how many of them to take, and what that leaves in ms."""
    ranked = np.sort(net[net > 0.0])[::-1][: len(verify_ms) - 1]
    score = -verify_ms[: len(ranked) + 1]
    score[1:] += ranked.cumsum()
    budget = int(score.argmax())
    return ranked, budget, float(score[budget])


def _first(net: Array, least: float, budget: int) -> Array:
    """Return k i32 [rows]: `budget` places that gain `least` or more, of equals the first rows'."""
    k: Array = (net >= least).sum(axis=0, dtype=np.int32)
    beyond = int(k.sum()) - budget
    if beyond:
        equal = np.nonzero((net == least).T)[0]
        np.subtract.at(k, equal[-beyond:], 1)
    return k


def _cut(ranked: Array, taken: int, price: float) -> float:
    """Return a price at 0 or above that parts the gains which were taken from the others."""
    outside = float(ranked[taken]) if taken < len(ranked) else 0.0
    inside = float(ranked[taken - 1]) if taken else np.inf
    return max(min(max(price, float(np.nextafter(outside, np.inf))), inside), 0.0)


def priced(
    survival: Array, costs: StepCosts, emits: float, proposer: Array, k: Array, price: float
) -> Allocation:
    """Return the plan with its tokens and time as they really add up."""
    return _priced(_batch(survival, costs, emits), proposer, k, price)


def _priced(batch: _Batch, proposer: Array, k: Array, price: float) -> Allocation:
    costs, budget = batch.costs, int(k.sum())
    drafts = (proposer == DRAFT_MODEL) & (k > 0)
    each = np.empty((len(k), 2))
    each[:, 0] = batch.totals[proposer, k, np.arange(len(k))]
    each[:, 1] = costs.token_ms[proposer] * k + drafts * costs.switch_ms
    tokens, ms = each.sum(axis=0).tolist()
    depth = int((k * drafts).max(initial=0))
    ms += float(costs.verify_ms[budget]) + depth * costs.pass_ms
    if costs.heads_ms > 0.0 and ((proposer == MEDUSA) & (k > 0)).any():
        ms += costs.heads_ms
    if costs.pad_ms > 0.0:
        ms += costs.pad_ms * (batch.emits * int(k.max(initial=0)) - budget)
    return Allocation(proposer, k, depth, batch.emits + tokens, ms, price)
