"""A plan that serves for some steps: what it makes of each match length, worked out once.

`fit_plan` decides anew for every row whose text's match has changed, which in every step costs more
than the policy does. What it would decide depends on the match's bucket only, so that a table
answers for the steps to come.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np

from parlay.engine.plugins.fitting import every_row, fitted
from parlay.policies.allocate import ngram_survival
from parlay.policies.types import (
    DRAFT_MODEL,
    MATCH_EDGES,
    MEDUSA,
    NGRAM,
    NO_BUDGET,
    Array,
    BatchView,
    Fitted,
    Plan,
    Reason,
)

_EDGES = np.array(MATCH_EDGES, np.int32)
_MATCHES = np.array((0, *MATCH_EDGES), np.int32)
"""A match length of each bucket."""
_BUCKET = [bisect.bisect_right(MATCH_EDGES, match) for match in range(MATCH_EDGES[-1])]
_LEAST_MS, _SAME = 1e-9, 1e-5
_SHARED = 1 << DRAFT_MODEL | 1 << MEDUSA
_TRIES = (int(Reason.EXPLORE), int(Reason.WARM_UP))


class Fitter:
    """Fits plans as `fit_plan` does; quick where one is of this very view, or serves again."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._view: BatchView | None = None
        self._table: _Table | None = None
        self._order: Order | None = None
        self._served_again = self._served_unseen = False

    @property
    def orders(self) -> bool:
        """Say whether `order` has an answer for the plan fitted last."""
        return self._view is not None

    def order(self, plan: Plan) -> Order | None:
        """Return what the plan fitted last says without a view; None: it takes one."""
        if plan is not self._plan or self._view is None:
            return None
        if self._order is None or self._order.plan is not plan:
            self._order = Order(_Table(plan, self._view, each_alone=True))
        self._served_unseen = True
        return self._order

    def fit(self, plan: Plan | None, view: BatchView) -> Fitted:
        """Return who drafts how many tokens; reasons are the plan's own, survivals left out."""
        if plan is None or not _is_priced(plan, view):
            self._plan = self._table = self._view = None
            return fitted(plan, view)
        if plan.request_id is not view.request_id:
            table = self._table if plan is self._plan else None
            left = None if table is None else table.of_those_left(view)
            return fitted(plan, view) if left is None else left
        new, self._plan = plan is not self._plan, plan
        if new:
            # Where others draft too, how deep one may go depends on the rest of the batch.
            alone = not int(np.bitwise_or.reduce(view.proposer_mask)) & _SHARED
            self._view = view if alone else None
            # Right after the policy, whose arrays are still at hand, a table costs least.
            self._table = _Table(plan, view) if self._served_again else None
            self._served_again = False
            if alone and self._served_unseen:
                self._order = Order(_Table(plan, view, each_alone=True))
            self._served_unseen = False
        if plan.step_id == view.step_id:
            return fitted(plan, view)
        self._served_again = True
        table = self._table
        if table is None or not table.goes_for(view):
            self._table = table = _Table(plan, view)
        return table.fit(view)


class Order:
    """A table in plain numbers, for steps without a view: no call of numpy's in them.

    It is `fit_plan`'s for every row alone: a longer one does not pad the others. Who is not in the
    plan is taken for a request like any other, at the plan's prices.
    """

    def __init__(self, table: _Table) -> None:
        self.plan, shape = table.plan, (len(_MATCHES), len(table.plan))
        proposers = table.proposer.reshape(shape).T.tolist()
        lengths = table.k.reshape(shape).T.tolist()
        ids = table.plan.request_id.tolist()
        self._known = dict(zip(ids, zip(proposers, lengths, strict=True), strict=True))
        self._new = (*table.newcomer(),)

    def rows(self, ids: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Return each request's proposers and lengths by the bucket of its match."""
        known, new = self._known, self._new
        return [known.get(name, new) for name in ids]

    def follows(self, ids: Sequence[int]) -> Array:
        """Return which requests the plan was made for, bool [rows]."""
        return np.array([name in self._known for name in ids], bool)


def bucket_of(match_tokens: int) -> int:
    """Return the bucket of one match length."""
    return _BUCKET[match_tokens] if match_tokens < len(_BUCKET) else len(MATCH_EDGES)


def _is_priced(plan: Plan, view: BatchView) -> bool:
    """Say whether a row's drafts depend on its own match only, at prices that are known."""
    return (
        plan.survival is not None
        and plan.match_hazard is not None
        and plan.budget_tokens == NO_BUDGET
        and not len(view.bucket_edges)
        and math.isfinite(plan.token_value_ms)
    )


class _Table:
    """Proposer u8 and k i32 [buckets * rows] under one plan, for views of the same requests.

    each_alone: no row is kept from going deeper than the others.
    """

    def __init__(self, plan: Plan, view: BatchView, each_alone: bool = False) -> None:
        self.each_alone = each_alone
        self.plan, self.mask, self.max_k = plan, view.proposer_mask, view.max_k
        self.rows = np.arange(len(plan))
        assert plan.survival is not None
        self.survival = plan.survival
        allowed = int(np.bitwise_or.reduce(self.mask))
        others = [p for p in (DRAFT_MODEL, MEDUSA) if allowed >> p & 1]
        # Of two proposers the better may be another where a row may not draft so deep.
        self.any_room = not others
        now = self._ngram()
        changed = np.abs(now[..., 0] - self.survival[:, NGRAM, 0]) > _SAME
        changed &= (plan.reason != _TRIES[0]) & (plan.reason != _TRIES[1])
        proposer, k = self._priced(now, others)
        proposer = np.where(changed, proposer, plan.proposer)
        k = np.where(changed, k, plan.k) * ((self.mask >> proposer) & 1) * (proposer > 0)
        k[0] *= proposer[0] != NGRAM
        self.proposer = proposer.astype(np.uint8).ravel()
        self.k = k.astype(np.int32).ravel()

    def newcomer(self) -> tuple[list[int], list[int]]:
        """Return the n-gram's proposers and lengths by bucket for a request like any other."""
        plan = self.plan
        assert plan.match_hazard is not None
        places = ngram_survival(plan.match_hazard, np.ones(len(_MATCHES), np.float32), _MATCHES)
        price = float(plan.marginal_token_price_ms + plan.draft_token_price_ms[NGRAM])
        worth = places * plan.token_value_ms >= max(price, _LEAST_MS)
        return [NGRAM] * len(_MATCHES), worth.sum(axis=1).tolist()

    def goes_for(self, view: BatchView) -> bool:
        """Say whether the rows may draft what they could when this was made."""
        if view.proposer_mask is not self.mask:
            return False
        return self.any_room or np.array_equal(view.max_k, self.max_k)

    def fit(self, view: BatchView) -> Fitted:
        """Return what `fit_plan` would of this plan."""
        plan = self.plan
        proposer, k = self._chosen(view, self.rows)
        every = every_row(len(k))
        return Fitted(proposer, k, k, every, plan.shadow, plan.propensity, plan.reason)

    def of_those_left(self, view: BatchView) -> Fitted | None:
        """Return the fit of a view that only lacks some rows; None where that takes another look.

        Alone a row may go deeper, and so may the drafting model's rows without the others.
        """
        if not self.any_room or len(view) < 2:
            return None
        place = {name: row for row, name in enumerate(self.plan.request_id.tolist())}
        rows = np.array([place.get(name, -1) for name in view.request_id.tolist()])
        if rows.min() < 0 or (self.mask[rows] != view.proposer_mask).any():
            return None
        plan, every = self.plan, every_row(len(rows))
        proposer, k = self._chosen(view, rows)
        shown = plan.shadow[rows], plan.propensity[rows], plan.reason[rows]
        return Fitted(proposer, k, k, every, *shown)

    def _chosen(self, view: BatchView, rows: Array) -> tuple[Array, Array]:
        """Return proposer and k of the plan's `rows`, those of the view."""
        at = _EDGES.searchsorted(view.match_tokens, "right")
        at *= len(self.rows)
        at += rows
        k = self.k.take(at)
        np.minimum(k, view.max_k, out=k)
        return self.proposer.take(at) * (k > 0), k

    def _ngram(self) -> Array:
        """Return the n-gram's survival f32 [buckets, rows, K]."""
        hazard, frailty = self.plan.match_hazard, self.plan.match_frailty
        assert hazard is not None
        assert frailty is not None
        rows, buckets = len(self.rows), len(_MATCHES)
        match = np.repeat(_MATCHES, rows)
        survival = ngram_survival(np.repeat(hazard, rows, axis=0), np.tile(frailty, buckets), match)
        return survival.reshape(buckets, rows, -1)

    def _priced(self, ngram: Array, others: list[int]) -> tuple[Array, Array]:
        """Return the proposer and k [buckets, rows] that a row has at the plan's prices."""
        plan = self.plan
        price = plan.marginal_token_price_ms + plan.draft_token_price_ms
        best = np.zeros(ngram.shape[:2], np.float32)
        proposer, k = np.zeros(best.shape, np.uint8), np.zeros(best.shape, np.int32)
        for p in (NGRAM, *others):
            places = ngram if p == NGRAM else np.ascontiguousarray(self.survival[:, p])
            value = places * plan.token_value_ms
            worth = value >= max(price[p], _LEAST_MS)
            worth &= np.arange(places.shape[-1]) < self._limit(p)[:, None]
            net = np.where(worth, value - price[p], 0.0).sum(axis=-1)
            better = net > best
            best, proposer = np.where(better, net, best), np.where(better, p, proposer)
            k = np.where(better, worth.sum(axis=-1), k)
        return proposer, k

    def _limit(self, proposer: int) -> Array:
        """Return how deep a row may go with a proposer: passes and padding are shared."""
        plan, depth = self.plan, self.survival.shape[2]
        deepest = int(plan.k.max(initial=0, where=plan.proposer == proposer))
        if proposer != NGRAM or (len(self.rows) > 1 and deepest and not self.each_alone):
            depth = deepest
        allowed = (self.mask >> proposer) & 1
        return allowed * (depth if self.any_room else np.minimum(depth, self.max_k))
