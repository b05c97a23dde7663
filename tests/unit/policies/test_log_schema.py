"""Rows of the decision log: a step becomes rows and is read back as it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policies.logged import assert_same, random_rows, random_step

from parlay.policies.log_schema import (
    COLUMNS,
    SCHEMA_VERSION,
    in_sample,
    joined,
    kept_rows,
    rows_of,
    steps_of,
)
from parlay.policies.types import no_shadows


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_a_step_is_read_back_as_it_was(seed: int, rows: int) -> None:
    view, fit, plan, outcome = random_step(seed, rows)
    (step,) = steps_of(rows_of(view, fit, plan, outcome, "left"))
    place = {int(r): i for i, r in enumerate(view.request_id)}
    by_row = np.argsort([place[int(r)] for r in outcome.shadow.request_id], kind="stable")
    for name in outcome.shadow.__slots__:
        values = getattr(outcome.shadow, name)
        setattr(outcome.shadow, name, values[by_row.astype(np.intp)])
    assert_same(view, step.view)
    assert_same(fit, step.fit)
    assert_same(outcome, step.outcome)
    np.testing.assert_array_equal(step.planned_k, plan.k)
    np.testing.assert_array_equal(step.planned_proposer, plan.proposer)
    assert (step.engine, step.policy_version, step.state_version) == ("left", f"v{seed}", seed)
    assert step.rows_in_step == rows


def test_rows_have_the_columns_and_types_of_the_table() -> None:
    rows = random_rows(3)
    counts = {c.count for c in COLUMNS if c.count}
    assert set(rows) == {c.name for c in COLUMNS} | counts
    for column in COLUMNS:
        kind = np.dtype(column.dtype)
        found = rows[column.name].dtype
        assert found.kind == "U" if kind.kind == "U" else found == kind, column.name
    assert (rows["schema_version"] == SCHEMA_VERSION).all()


def test_steps_lie_one_after_the_other_and_keep_their_own_lists() -> None:
    parts = [random_rows(seed, 3, step_id=seed // 2) for seed in range(6)]
    steps = list(steps_of(joined(parts)))
    assert [(s.engine, s.view.step_id) for s in steps] == [
        (f"engine {seed % 2}", seed // 2) for seed in range(6)
    ]
    for part, step in zip(parts, steps, strict=True):
        (alone,) = steps_of(part)
        assert_same(alone, step)


def test_a_sample_keeps_or_leaves_whole_requests_and_says_how_many_there_were() -> None:
    rows = random_rows(1, rows=6)
    keep = np.array([True, False, True, True, False, False])
    (step,) = steps_of(kept_rows(rows, keep))
    (whole,) = steps_of(rows)
    assert step.rows_in_step == 6
    np.testing.assert_array_equal(step.view.request_id, whole.view.request_id[keep])
    np.testing.assert_array_equal(step.outcome.confidences, whole.outcome.confidences[keep])
    kept = np.isin(whole.outcome.shadow.request_id, step.view.request_id)
    np.testing.assert_array_equal(step.outcome.shadow.matched, whole.outcome.shadow.matched[kept])


@given(st.floats(0.0, 1.0))
def test_the_share_of_requests_kept_is_the_rate(rate: float) -> None:
    ids = np.arange(4000, dtype=np.uint64)
    kept = in_sample(ids, rate)
    assert abs(kept.mean() - rate) < 0.04
    np.testing.assert_array_equal(kept[::-1], in_sample(ids[::-1], rate))
    assert not in_sample(ids, 0.0).any()
    assert in_sample(ids, 1.0).all()


def test_what_was_planned_is_what_was_fitted_where_the_plan_had_no_row() -> None:
    view, fit, plan, outcome = random_step(5)
    plan.request_id = plan.request_id[::-1].copy()
    plan.request_id[0] = 3
    gone = view.request_id == view.request_id[-1]
    fit.follows = ~gone
    rows = rows_of(view, fit, plan, outcome)
    np.testing.assert_array_equal(rows["planned_k"][~gone], plan.k[::-1][~gone])
    np.testing.assert_array_equal(rows["planned_k"][gone], fit.k[gone])


def test_shadow_drafts_of_strangers_are_left_out() -> None:
    view, fit, plan, outcome = random_step(5)
    outcome.shadow.request_id = outcome.shadow.request_id + np.uint64(1)
    assert rows_of(view, fit, plan, outcome)["shadow_count"].sum() == 0
    outcome.shadow = no_shadows()
    assert rows_of(view, fit, plan, outcome)["shadow_count"].sum() == 0


def test_an_outcome_of_another_step_is_refused() -> None:
    view, fit, plan, outcome = random_step(5)
    outcome.step_id += 1
    with pytest.raises(ValueError, match="log each view with the outcome of its own step"):
        rows_of(view, fit, plan, outcome)
