from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policies.test_allocate import plan_of, view_of

from parlay.engine.plugins.fitting import every_row
from parlay.engine.plugins.followed import Fitter, bucket_of
from parlay.policies.allocate import fit_plan, ngram_survival
from parlay.policies.types import (
    DRAFT_MODEL,
    MATCH_EDGES,
    MEDUSA,
    NGRAM,
    PROPOSERS,
    BatchView,
    Plan,
    Reason,
    match_bucket,
)

K = 6
_SHARED = 1 << DRAFT_MODEL | 1 << MEDUSA
SHOWN = ("proposer", "k", "verify_k")


@st.composite
def planned(draw: Any) -> tuple[Plan, BatchView]:
    """A plan with prices for a batch, and the view that it was made for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, arms = draw(st.integers(1, 5)), draw(st.sampled_from([(), (DRAFT_MODEL,), (2, MEDUSA)]))
    view = view_of(
        list(range(rows)),
        match_tokens=rng.integers(0, 20, rows).astype(np.int32),
        max_k=rng.integers(0, K + 3, rows).astype(np.int32),
        proposer_mask=(rng.integers(0, 16, rows).astype(np.uint8) | 1) & (15 if arms else 3),
    )
    hazard = rng.uniform(0.0, 0.9, (len(MATCH_EDGES) + 1, K)).astype(np.float32)
    frailty = rng.uniform(0.3, 2.0, rows).astype(np.float32)
    survival = np.zeros((rows, PROPOSERS, K), np.float32)
    bucket = match_bucket(view.match_tokens)
    survival[:, NGRAM] = ngram_survival(hazard[bucket], frailty, view.match_tokens)
    for p in arms:
        survival[:, p] = np.cumprod(rng.uniform(0.3, 1.0, (rows, K)), axis=1)
    plan = plan_of(
        list(range(rows)),
        rng.choice([0, NGRAM, *arms], rows).tolist(),
        rng.integers(0, K + 1, rows).tolist(),
        survival=survival,
        match_hazard=hazard,
        match_frailty=frailty,
        token_value_ms=float(rng.uniform(2.0, 12.0)),
        marginal_token_price_ms=float(rng.uniform(0.0, 4.0)),
        draft_token_price_ms=rng.uniform(0.0, 1.0, PROPOSERS).astype(np.float32),
        reason=rng.choice([Reason.BEST_GOODPUT, Reason.NO_GAIN, Reason.EXPLORE], rows),
    )
    return dataclasses.replace(plan, request_id=view.request_id), view


@given(planned(), st.integers(0, 2**32 - 1), st.booleans())
def test_a_plan_that_serves_again_is_fitted_as_by_fit_plan(
    made: tuple[Plan, BatchView], seed: int, ends: bool
) -> None:
    plan, view = made
    rng, fitter = np.random.default_rng(seed), Fitter()
    for step in range(1, 4):
        rows = len(view)
        match = rng.integers(0, 20, rows).astype(np.int32)
        room = np.maximum(view.max_k - rng.integers(0, 3, rows), 0) if ends else view.max_k
        view = dataclasses.replace(
            view, match_tokens=match, max_k=room.astype(np.int32), step_id=step
        )
        ours, theirs = fitter.fit(plan, view), fit_plan(plan, view)
        for name in SHOWN:
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        assert ours.k.dtype == theirs.k.dtype
        assert ours.proposer.dtype == theirs.proposer.dtype
        assert ours.follows is every_row(rows)  # the short way


@given(planned(), st.integers(0, 2**32 - 1))
def test_of_some_that_are_left_it_is_fitted_alike(made: tuple[Plan, BatchView], seed: int) -> None:
    plan, view = made
    rng, fitter = np.random.default_rng(seed), Fitter()
    fitter.fit(plan, dataclasses.replace(view, step_id=1))
    for step in (2, 3):
        stay = np.sort(rng.choice(len(view), rng.integers(1, len(view) + 1), replace=False))
        match = rng.integers(0, 20, len(stay)).astype(np.int32)
        per_row = {f.name: getattr(view, f.name) for f in dataclasses.fields(view)}
        rows = {n: a[stay] for n, a in per_row.items() if np.shape(a) == (len(view),)}
        left = dataclasses.replace(view, **{**rows, "match_tokens": match, "step_id": step})
        ours, theirs = fitter.fit(plan, left), fit_plan(plan, left)
        for name in SHOWN:
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        assert len(ours.reason) == len(ours.shadow) == len(stay)


@given(planned(), st.integers(0, 2**32 - 1))
def test_an_order_says_of_each_row_what_it_would_do_alone(
    made: tuple[Plan, BatchView], seed: int
) -> None:
    plan, view = made
    rng, fitter = np.random.default_rng(seed), Fitter()
    assert not fitter.orders
    fitter.fit(plan, view)
    assert fitter.orders == (not (view.proposer_mask & _SHARED).any())
    order = fitter.order(plan)
    assert (order is not None) == fitter.orders
    if order is None:
        return
    assert fitter.order(dataclasses.replace(plan)) is None  # another plan
    ids, rows = [*range(len(view)), 70], len(view)
    assert order.follows(ids).tolist() == [True] * rows + [False]
    with_one = _and_a_newcomer(plan, 70)
    for row, (proposers, lengths) in enumerate(order.rows(ids)):
        match = int(rng.integers(0, 20))
        room = int(view.max_k[row]) if row < rows else int(rng.integers(0, K + 3))
        mask = view.proposer_mask[row : row + 1] if row < rows else np.array([3], np.uint8)
        alone = view_of(
            ids[row : row + 1], match, max_k=np.array([room], np.int32), proposer_mask=mask
        )
        theirs, at = fit_plan(with_one, alone), bucket_of(match)
        k = min(lengths[at], room)
        assert (k, proposers[at] if k else 0) == (theirs.k[0], theirs.proposer[0])


def _and_a_newcomer(plan: Plan, name: int) -> Plan:
    """Return the plan with one request more, of which it knows nothing."""

    def longer(column: Any, last: float) -> Any:
        return np.concatenate([column, np.full((1, *column.shape[1:]), last, column.dtype)])

    last = {"request_id": name, "propensity": 1.0, "match_frailty": 1.0, "survival": -1.0}
    names = ("proposer", "k", "shadow", "reason", *last)
    columns = {n: longer(getattr(plan, n), last.get(n, 0)) for n in names}
    return dataclasses.replace(plan, **columns)


@pytest.mark.parametrize("change", ["request", "mask", "plan", "alone"])
def test_another_batch_or_plan_is_looked_at_anew(change: str) -> None:
    view = view_of([1, 2], 9, step_id=1, proposer_mask=np.array([3, 3], np.uint8))
    hazard = np.full((len(MATCH_EDGES) + 1, K), 0.1, np.float32)
    plan = plan_of(
        [1, 2],
        [NGRAM, 0],
        [2, 0],
        request_id=view.request_id,
        survival=np.zeros((2, PROPOSERS, K), np.float32),
        match_hazard=hazard,
        match_frailty=np.ones(2, np.float32),
        token_value_ms=9.0,
        marginal_token_price_ms=1.0,
    )
    fitter = Fitter()
    assert fitter.fit(plan, view).k.tolist() == fit_plan(plan, view).k.tolist() == [2, 2]
    if change == "request":
        view = dataclasses.replace(view, request_id=np.array([2, 7], np.uint64))
    elif change == "alone":  # it need not be as short as the other
        view = view_of([2], 9, step_id=2, proposer_mask=np.array([3], np.uint8))
        assert fit_plan(plan, view).k.tolist() == [K]
    elif change == "mask":
        view = dataclasses.replace(view, proposer_mask=np.array([1, 3], np.uint8))
    else:
        plan = dataclasses.replace(plan, marginal_token_price_ms=99.0)
    assert fitter.fit(plan, view).k.tolist() == fit_plan(plan, view).k.tolist()


def test_without_prices_rows_or_plan_it_is_fit_plan() -> None:
    view = view_of([1, 2], 9, step_id=1)
    plan = plan_of([1, 2], [NGRAM, NGRAM], [3, 2], request_id=view.request_id)
    fitter = Fitter()
    assert fitter.fit(plan, view).k.tolist() == [3, 2]
    assert fitter.fit(None, view).k.tolist() == [0, 0]
    budgeted = dataclasses.replace(plan, budget_tokens=2)
    assert fitter.fit(budgeted, view).verify_k.sum() == 2
