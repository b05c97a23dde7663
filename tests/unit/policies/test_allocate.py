"""`fit_plan`: a plan on the batch that is there, budgets, prices and the bias controls."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parlay.policies.allocate import fit_plan, keep_top, ngram_survival
from parlay.policies.types import (
    DRAFT_MODEL,
    MATCH_EDGES,
    NGRAM,
    NONE,
    PROPOSERS,
    BatchView,
    Plan,
    Reason,
    TaskDefaults,
    match_bucket,
    task_id,
)

K = 6


def view_of(ids: list[int], match: int = 5, **changes: Any) -> BatchView:
    rows = len(ids)
    view = BatchView(
        request_id=np.array(ids, np.uint64),
        task=np.zeros(rows, np.uint32),
        context_tokens=np.full(rows, 100, np.int32),
        output_tokens=np.full(rows, 10, np.int32),
        prefill_tokens=np.zeros(rows, np.int32),
        temperature=np.zeros(rows, np.float32),
        max_k=np.full(rows, 16, np.int32),
        proposer_mask=np.full(rows, 0b0111, np.uint8),
        tpot_target_ms=np.full(rows, np.nan, np.float32),
        recent_accept=np.ones(rows, np.float32),
        match_tokens=np.full(rows, match, np.int32),
        draft_kv_lag=np.zeros(rows, np.int32),
        seeded=np.zeros(rows, bool),
        running=rows,
    )
    return dataclasses.replace(view, **changes)


def plan_of(ids: list[int], proposer: list[int], k: list[int], **changes: Any) -> Plan:
    rows = len(ids)
    plan = Plan(
        request_id=np.array(ids, np.uint64),
        proposer=np.array(proposer, np.uint8),
        k=np.array(k, np.int16),
        shadow=np.zeros(rows, bool),
        propensity=np.linspace(0.5, 1.0, rows, dtype=np.float32),
        reason=np.full(rows, Reason.FIXED, np.uint8),
    )
    return dataclasses.replace(plan, **changes)


def priced_plan(ids: list[int], match: int, proposer: list[int], k: list[int]) -> Plan:
    """Return a plan with survivals: n-gram hazards fall with the match, the draft model's .4."""
    rows = len(ids)
    level = np.linspace(0.9, 0.1, len(MATCH_EDGES) + 1, dtype=np.float32)
    hazard = np.repeat(level[:, None], K, axis=1)
    survival = np.zeros((rows, PROPOSERS, K), np.float32)
    bucket = match_bucket(np.full(rows, match))
    survival[:, NGRAM] = ngram_survival(
        hazard[bucket], np.ones(rows, np.float32), np.full(rows, match)
    )
    survival[:, DRAFT_MODEL] = 0.6 ** np.arange(1, K + 1)
    return plan_of(
        ids,
        proposer,
        k,
        survival=survival,
        match_hazard=hazard,
        match_frailty=np.ones(rows, np.float32),
        token_value_ms=10.0,
        marginal_token_price_ms=2.0,
    )


def test_no_plan_speculates_nowhere() -> None:
    fit = fit_plan(None, view_of([1, 2]))
    assert fit.k.tolist() == fit.verify_k.tolist() == [0, 0]
    assert fit.proposer.tolist() == [NONE, NONE]
    assert not fit.follows.any()
    assert len(fit_plan(None, view_of([])).k) == 0


def test_rows_are_matched_by_request_in_any_order() -> None:
    plan = plan_of([30, 10, 20], [NGRAM, DRAFT_MODEL, NGRAM], [3, 1, 2])
    fit = fit_plan(plan, view_of([10, 99, 30, 20, 5]))
    assert fit.k.tolist() == [1, 0, 3, 2, 0]
    assert fit.proposer.tolist() == [DRAFT_MODEL, NONE, NGRAM, NGRAM, NONE]
    assert fit.follows.tolist() == [True, False, True, True, False]
    assert fit.propensity.tolist() == pytest.approx([0.75, 1.0, 0.5, 1.0, 1.0])


def test_new_requests_get_their_tasks_default_else_task_0s() -> None:
    code = task_id("code")
    defaults = TaskDefaults(
        np.array([0, code], np.uint32), np.array([DRAFT_MODEL, NGRAM], np.uint8), np.array([1, 4])
    )
    plan = plan_of([1], [NGRAM], [2], defaults=defaults)
    view = view_of([1, 2, 3], task=np.array([0, code, task_id("chat")], np.uint32))
    fit = fit_plan(plan, view)
    assert fit.k.tolist() == [2, 4, 1]
    assert fit.proposer.tolist() == [NGRAM, NGRAM, DRAFT_MODEL]
    only_code = dataclasses.replace(
        defaults, task=defaults.task[1:], proposer=defaults.proposer[1:], k=defaults.k[1:]
    )
    fit = fit_plan(dataclasses.replace(plan, defaults=only_code), view)
    assert fit.k.tolist() == [2, 4, 0]
    empty = plan_of([], [], [], defaults=defaults)
    assert fit_plan(empty, view).k.tolist() == [1, 4, 1]


def test_what_a_row_may_not_draft_is_taken_back() -> None:
    plan = plan_of([1, 2, 3, 4, 5], [NGRAM, NGRAM, DRAFT_MODEL, DRAFT_MODEL, NGRAM], [5] * 5)
    view = view_of(
        [1, 2, 3, 4, 5],
        max_k=np.array([2, 16, 16, 16, 0], np.int32),
        match_tokens=np.array([3, 0, 0, 0, 3], np.int32),
        prefill_tokens=np.array([0, 0, 0, 20, 0], np.int32),
        proposer_mask=np.array([7, 7, 0b011, 7, 7], np.uint8),
    )
    fit = fit_plan(plan, view)
    assert fit.k.tolist() == [2, 0, 0, 0, 0]
    assert fit.proposer.tolist() == [NGRAM, NONE, NONE, NONE, NONE]
    assert fit.reason[1] == Reason.NO_MATCH
    assert fit.reason[2] == fit.reason[3] == Reason.NOT_ALLOWED


def test_unchanged_rows_follow_the_plan_to_the_letter() -> None:
    plan = priced_plan([1, 2], 5, [NGRAM, NONE], [6, 0])
    fit = fit_plan(plan, view_of([1, 2], match=5))
    assert fit.k.tolist() == [6, 0]


def test_a_longer_match_is_followed_by_a_longer_draft() -> None:
    plan = priced_plan([1, 2], 1, [NONE, NONE], [0, 0])
    ks = []
    for match in (1, 2, 3, 4, 6, 9, 16):
        fit = fit_plan(plan, view_of([1, 2], match=match))
        ks.append(int(fit.k[0]))
    assert ks == sorted(ks)
    assert ks[0] == 0
    assert ks[-1] == K


def test_a_row_decided_again_goes_no_deeper_than_the_plans_lookups() -> None:
    plan = priced_plan([1, 2], 1, [NONE, NGRAM], [0, 2])
    view = view_of([1, 2], match_tokens=np.array([16, 1], np.int32))
    assert fit_plan(plan, view).k.tolist() == [2, 2]
    without = priced_plan([1, 2], 1, [NONE, NONE], [0, 0])
    assert fit_plan(without, view).k.tolist() == [K, 0]


def test_a_row_alone_is_decided_again_to_any_depth() -> None:
    plan = priced_plan([1], 1, [NGRAM], [2])
    assert fit_plan(plan, view_of([1], match=16)).k.tolist() == [K]


def test_a_lost_match_falls_back_on_passes_that_others_need() -> None:
    plan = priced_plan([1, 2], 16, [NGRAM, DRAFT_MODEL], [6, 2])
    view = view_of([1, 2], match_tokens=np.array([0, 16], np.int32))
    fit = fit_plan(plan, view)
    assert fit.proposer.tolist() == [DRAFT_MODEL, DRAFT_MODEL]
    assert fit.k.tolist() == [2, 2]


def test_one_row_does_not_start_a_draft_pass() -> None:
    plan = priced_plan([1, 2], 16, [NGRAM, NGRAM], [6, 6])
    view = view_of([1, 2], match_tokens=np.array([0, 16], np.int32))
    fit = fit_plan(plan, view)
    assert fit.proposer.tolist() == [NONE, NGRAM]
    assert fit.k.tolist() == [0, 6]


def test_a_try_is_left_as_it_is() -> None:
    plan = priced_plan([1], 1, [DRAFT_MODEL], [2])
    plan.reason[:] = Reason.EXPLORE
    fit = fit_plan(plan, view_of([1], match=16))
    assert (int(fit.proposer[0]), int(fit.k[0])) == (DRAFT_MODEL, 2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(0, 60),
    st.booleans(),
    st.data(),
)
def test_budgets_and_limits_hold(
    ks: list[int], budget: int, estimates: bool, data: st.DataObject
) -> None:
    rows = len(ks)
    ids = list(range(rows))
    rng = np.random.default_rng(sum(ks) + budget)
    survival = None
    if estimates:
        survival = rng.random((rows, PROPOSERS, 20)).cumprod(axis=2).astype(np.float32)
    plan = plan_of(ids, [DRAFT_MODEL] * rows, ks, survival=survival, budget_tokens=budget)
    edges = data.draw(st.sampled_from([[], [8, 16, 32, 64], [4]]))
    max_k = rng.integers(0, 12, rows).astype(np.int32)
    view = view_of(ids, max_k=max_k, bucket_edges=np.array(edges, np.int32))
    fit = fit_plan(plan, view)
    assert fit.verify_k.sum() <= budget
    assert fit.k.sum() <= max(budget, sum(ks)), "more than planned is drafted for no budget"
    assert (fit.k >= 0).all()
    assert (fit.k <= max_k).all()
    assert (fit.verify_k <= fit.k).all()
    assert ((fit.k > 0) == (fit.proposer != NONE)).all()
    drafted = np.minimum(fit.k, rng.integers(0, 12, rows)).astype(np.int32)
    confidences = rng.random((rows, 12)).astype(np.float32)
    confidences[rng.random((rows, 12)) < 0.2] = np.nan
    after = fit_plan(plan, view, drafted, confidences)
    assert (after.verify_k <= drafted).all()
    assert after.verify_k.sum() == min(drafted.sum(), max(budget, 0))
    assert (after.k == fit.k).all()


def test_a_budget_keeps_the_best_as_brute_force_does() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        survival = rng.random((3, 3)).cumprod(axis=1)
        budget = int(rng.integers(0, 10))
        k = keep_top(survival, np.full(3, 3), budget)
        best = max(
            sum(survival[row, :n].sum() for row, n in enumerate(choice))
            for choice in itertools.product(range(4), repeat=3)
            if sum(choice) <= budget
        )
        assert sum(survival[row, :n].sum() for row, n in enumerate(k)) == pytest.approx(best)


def test_without_estimates_a_budget_is_shared_evenly() -> None:
    assert keep_top(None, np.array([5, 5, 1]), 6).tolist() == [3, 2, 1]
    assert keep_top(None, np.array([5, 5, 1]), 0).tolist() == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 4), st.integers(0, 12))
def test_more_survival_never_means_less_k(seed: int, row: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    survival = rng.random((5, 4)).cumprod(axis=1)
    before = keep_top(survival, np.full(5, 4), budget)
    survival[row] = survival[row] ** rng.uniform(0.2, 1.0)
    assert keep_top(survival, np.full(5, 4), budget)[row] >= before[row]


def test_tokens_inside_a_padded_bucket_are_filled() -> None:
    plan = priced_plan([1, 2], 16, [NGRAM, NGRAM], [2, 2])
    view = view_of([1, 2], match=16, bucket_edges=np.array([4, 8, 16], np.int32))
    assert fit_plan(plan, view).k.tolist() == [3, 3]
    tight = dataclasses.replace(plan, budget_tokens=5)
    assert fit_plan(tight, view).k.tolist() == [3, 2]
    off = dataclasses.replace(plan, k=np.zeros(2, np.int16))
    assert fit_plan(off, view).k.tolist() == [0, 0]


def test_verifying_ranks_by_calibrated_confidence_before_the_draw() -> None:
    plan = plan_of([1, 2], [DRAFT_MODEL] * 2, [3, 3], budget_tokens=6)
    view = view_of([1, 2])
    confidences = np.array([[0.9, 0.9, 0.9], [0.5, 0.99, 0.99]], np.float32)
    assert fit_plan(plan, view, np.array([3, 3]), confidences).verify_k.tolist() == [3, 3]
    tight = dataclasses.replace(plan, budget_tokens=4)
    assert fit_plan(tight, view, np.array([3, 3]), confidences).verify_k.tolist() == [3, 1]
    assert fit_plan(tight, view, np.array([1, 3]), confidences).verify_k.tolist() == [1, 3]
    flat = np.zeros((PROPOSERS, 2), np.float32)
    calibrated = dataclasses.replace(tight, calibration=flat)
    assert fit_plan(calibrated, view, np.array([3, 3]), confidences).verify_k.tolist() == [2, 2]


def test_plans_that_make_no_sense_are_survived() -> None:
    view = view_of([1, 2])
    lost = plan_of([8, 9], [NGRAM, NGRAM], [3, 3])
    empty = TaskDefaults(np.zeros(0, np.uint32), np.zeros(0, np.uint8), np.zeros(0, np.int16))
    assert fit_plan(dataclasses.replace(lost, defaults=empty), view).k.tolist() == [0, 0]
    unknown = priced_plan([1, 2], 5, [PROPOSERS, 200], [3, -3])
    assert fit_plan(unknown, view).k.tolist() == [0, 0]
    deeper = priced_plan([1, 2], 5, [NGRAM, DRAFT_MODEL], [K + 3, K + 5])
    assert fit_plan(deeper, view).k.tolist() == [K + 3, K + 5]
    few = fit_plan(dataclasses.replace(deeper, budget_tokens=9), view)
    assert few.k.sum() == 2 * K + 8
    assert few.verify_k.sum() == 9
    drafted = np.array([K + 3, K + 5])
    confidences = np.full((2, K + 5), 0.5, np.float32)
    cut = fit_plan(dataclasses.replace(deeper, budget_tokens=9), view, drafted, confidences)
    assert cut.verify_k.sum() == 9


@pytest.mark.parametrize("late", [0.01, 0.99])
def test_a_later_confidence_admits_no_token_though_the_plan_rises(late: float) -> None:
    plan = priced_plan([1, 2], 5, [DRAFT_MODEL, DRAFT_MODEL], [3, 3])
    assert plan.survival is not None
    plan.survival[:, DRAFT_MODEL] = 0.5
    plan.survival[0, DRAFT_MODEL, 0] = 0.3
    plan.survival[0, DRAFT_MODEL, 1:] = 0.9
    plan.budget_tokens = 2
    confidences = np.full((2, 3), np.nan, np.float32)
    confidences[0, 2] = late
    fit = fit_plan(plan, view_of([1, 2]), np.array([3, 3]), confidences)
    assert fit.verify_k.tolist() == [0, 2]


@pytest.mark.parametrize("odd", [float("nan"), -5.0, float("-inf")])
def test_survivals_that_make_no_sense_give_no_row_more_than_its_k(odd: float) -> None:
    survival = np.array([[odd, odd], [0.9, 0.8]])
    assert keep_top(survival, np.array([2, 1]), 2).tolist() == [1, 1]
    assert keep_top(survival, np.array([0, 2]), 2).tolist() == [0, 2]
