"""Steps to log: random ones with every field set, for the tests of the decision log."""

from __future__ import annotations

import dataclasses

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.baselines.rows import rows_plan
from parlay.policies.log_schema import Columns, LoggedStep, rows_of
from parlay.policies.types import (
    PROPOSERS,
    BatchView,
    Fitted,
    Plan,
    Proposer,
    ShadowRows,
    StepOutcome,
)


def random_step(
    seed: int, rows: int = 4, step_id: int = 7, first: int = 1
) -> tuple[BatchView, Fitted, Plan, StepOutcome]:
    """Return what a step of requests first.. would have, with every value drawn."""
    rng = np.random.default_rng(seed)
    view = BatchView(
        request_id=rng.permutation(np.arange(first, first + rows)).astype(np.uint64)
        << np.uint64(40),
        task=rng.integers(0, 2**32, rows, np.uint32),
        context_tokens=rng.integers(1, 999, rows, np.int32),
        output_tokens=rng.integers(0, 99, rows, np.int32),
        prefill_tokens=np.zeros(rows, np.int32),
        temperature=rng.random(rows, np.float32),
        max_k=rng.integers(0, 9, rows, np.int32),
        proposer_mask=np.full(rows, 0b111, np.uint8),
        tpot_target_ms=np.where(rng.random(rows) < 0.5, np.nan, 30.0).astype(np.float32),
        recent_accept=rng.random(rows, np.float32),
        match_tokens=rng.integers(0, 4, rows, np.int32),
        draft_kv_lag=rng.integers(0, 50, rows, np.int32),
        seeded=rng.random(rows) < 0.5,
        **{
            name: int(rng.integers(1, 999))
            for name in ("running", "waiting", "free_blocks", "total_blocks", "kv_tokens")
        },
        step_id=step_id,
        bucket_edges=np.arange(int(rng.integers(0, 5)), dtype=np.int32),
    )
    plan = rows_plan(view, Proposer.DRAFT_MODEL, rng.integers(0, 9, rows))
    plan.propensity = rng.random(rows, np.float32)
    plan.policy_version, plan.state_version = f"v{seed}", seed
    fit = fit_plan(plan, view)
    accepted = (fit.k * rng.random(rows)).astype(np.int16)
    who = rng.permutation(np.repeat(view.request_id, rng.integers(0, 3, rows)))
    outcome = StepOutcome(
        request_id=view.request_id,
        task=view.task,
        proposer=fit.proposer,
        requested_k=fit.k.astype(np.int16),
        drafted_k=fit.k.astype(np.int16),
        verified_k=fit.k.astype(np.int16),
        accepted=accepted,
        emitted=accepted + np.int16(1),
        match_tokens=view.match_tokens,
        truncated_by=rng.integers(0, 4, rows, np.uint8),
        plan_source=rng.integers(0, 3, rows, np.uint8),
        plan_step_id=np.full(rows, step_id, np.uint64),
        confidences=rng.random((rows, int(rng.integers(0, 6))), np.float32),
        shadow=ShadowRows(
            request_id=who,
            proposer=rng.integers(1, 4, len(who), np.uint8),
            offered_k=rng.integers(1, 9, len(who), np.int16),
            matched=rng.random(len(who), np.float32),
            observed=rng.integers(1, 9, len(who), np.int16),
            match_tokens=rng.integers(0, 9, len(who), np.int32),
            kind=rng.integers(0, 2, len(who), np.uint8),
        ),
        step_id=step_id,
        padded_tokens=int(rng.integers(1, 99)),
        prefill_tokens=int(rng.integers(1, 99)),
        kv_tokens=int(rng.integers(1, 99)),
        draft_ms=rng.random(PROPOSERS, np.float32),
        draft_depth=int(fit.k.max(initial=0)),
        verify_ms=float(rng.random()),
        step_ms=float(rng.random()),
    )
    return view, fit, plan, outcome


def random_rows(seed: int, rows: int = 4, step_id: int = 7, first: int = 1) -> Columns:
    view, fit, plan, outcome = random_step(seed, rows, step_id, first)
    return rows_of(view, fit, plan, outcome, f"engine {seed % 2}")


def assert_same(left: object, right: object) -> None:
    """Compare two structs of arrays, types of arrays included."""
    assert dataclasses.is_dataclass(left)
    for field in dataclasses.fields(left):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if dataclasses.is_dataclass(ours):
            assert_same(ours, theirs)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
            if isinstance(ours, np.ndarray):
                assert ours.dtype == theirs.dtype, field.name


def assert_same_steps(left: list[LoggedStep], right: list[LoggedStep]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert_same(ours, theirs)
