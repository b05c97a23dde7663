from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policies.test_allocate import plan_of, view_of

from parlay.engine.plugins.fitting import every_row, fitted
from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits, make_policy
from parlay.policies.types import NO_BUDGET, BatchView, Plan

ROW = st.tuples(
    st.integers(0, 3), st.integers(0, 20), st.integers(0, 9), st.integers(0, 15), st.integers(0, 3)
)


def fresh(rows: list[tuple[int, ...]], budget: int) -> tuple[Plan, BatchView]:
    """A plan made for its view: proposer, k, max_k, proposer mask and match of each row."""
    proposer, k, max_k, mask, match = (list(column) for column in zip(*rows, strict=True))
    view = view_of(
        list(range(len(rows))),
        max_k=np.array(max_k, np.int32),
        proposer_mask=np.array(mask, np.uint8),
        match_tokens=np.array(match, np.int32),
    )
    plan = plan_of(list(range(len(rows))), proposer, k, budget_tokens=budget)
    return dataclasses.replace(plan, request_id=view.request_id), view


@given(st.lists(ROW, min_size=1, max_size=6), st.sampled_from([NO_BUDGET, 0, 3, 200]))
def test_a_plan_of_this_very_view_is_fitted_as_by_fit_plan(
    rows: list[tuple[int, ...]], budget: int
) -> None:
    plan, view = fresh(rows, budget)
    ours, theirs = fitted(plan, view), fit_plan(plan, view)
    for name in ("proposer", "k", "verify_k", "follows"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


def test_goodputs_own_plans_are_fitted_alike() -> None:
    limits = EngineLimits(k_max=8)
    policy = make_policy("goodput", {}, limits)
    for match in range(6):
        view = view_of(list(range(5)), match)
        plan = policy.decide(view)
        assert plan.request_id is view.request_id  # else the short way is never taken
        ours, theirs = fitted(plan, view), fit_plan(plan, view)
        assert ours.k.tolist() == theirs.k.tolist()
        assert ours.proposer.tolist() == theirs.proposer.tolist()
        assert ours.follows is every_row(5)


def test_an_older_plan_goes_the_long_way() -> None:
    plan, view = fresh([(1, 4, 9, 15, 2)] * 2, NO_BUDGET)
    view.step_id = 1
    assert fitted(plan, view).follows is not every_row(2)
    assert fitted(None, view).k.tolist() == [0, 0]
