"""The allocator against every plan there is, over many small batches; budgets; monotony."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from tests.unit.policies.test_allocate import plan_of, view_of
from tests.unit.policies.test_solver import random_costs, random_survival

from parlay.policies.allocate import fit_plan, keep_top
from parlay.policies.solver import StepCosts, best_plan
from parlay.policies.types import DRAFT_MODEL, NGRAM, PROPOSERS, Array

BATCHES = 10_000


def every_plan(rows: int, k_max: int, proposers: tuple[int, ...]) -> tuple[Array, Array]:
    """Return proposer and k i64 [plans, rows] of every plan, proposer 0 where k is 0."""
    choice = [(0, 0), *itertools.product(proposers, range(1, k_max + 1))]
    plans = np.array(list(itertools.product(choice, repeat=rows)))
    return plans[..., 0], plans[..., 1]


def least_ms_per_token(survival: Array, costs: StepCosts, plans: tuple[Array, Array]) -> float:
    """Return the best of `plans`."""
    proposer, k = plans
    total = k.sum(axis=1)
    fits = total < len(costs.verify_ms)
    proposer, k, total = proposer[fits], k[fits], total[fits]
    gain = np.concatenate([np.zeros((*survival.shape[:2], 1)), survival.cumsum(axis=2)], axis=2)
    tokens = len(survival) + gain[np.arange(len(survival)), proposer, k].sum(axis=1)
    modelled = proposer == DRAFT_MODEL
    ms = costs.verify_ms[total] + costs.pass_ms * np.where(modelled, k, 0).max(axis=1)
    ms = ms + (costs.token_ms[proposer] * k).sum(axis=1) + modelled @ costs.switch_ms
    return float((ms / tokens).min())


def gaps(batches: int, proposers: tuple[int, ...], free: bool) -> Array:
    """Return how much worse than the best each batch's plan is, f64 [batches]."""
    found, known = [], {}
    for seed in range(batches):
        rng = np.random.default_rng(seed)
        rows, k_max = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        used = proposers if free else (proposers[seed % len(proposers)],)
        survival = random_survival(rng, rows, k_max, list(used))
        costs = random_costs(
            rng, rows, int(rng.integers(1, 10)), staircase=bool(rng.random() < 0.5)
        )
        if not free:
            # Which rows the draft model takes on is a choice of proposer where that costs at once.
            costs.switch_ms[:] = 0.0
        key = rows, k_max, used
        if key not in known:
            known[key] = every_plan(rows, k_max, used)
        plan = best_plan(survival, costs, float(rows))
        assert int(plan.k.sum()) < len(costs.verify_ms)
        found.append(plan.ms_per_token / least_ms_per_token(survival, costs, known[key]) - 1.0)
    return np.array(found)


@pytest.mark.slow
def test_with_proposers_fixed_no_plan_is_better() -> None:
    gap = gaps(BATCHES, (NGRAM, DRAFT_MODEL), free=False)
    worst = int(np.abs(gap).argmax())
    assert abs(gap[worst]) < 1e-9, f"batch {worst} misses by {gap[worst]:.2e}"


@pytest.mark.slow
def test_with_proposers_free_the_best_is_close() -> None:
    gap = gaps(BATCHES, (NGRAM, DRAFT_MODEL), free=True)
    assert gap.min() > -1e-9
    assert gap.mean() <= 0.01
    assert gap.max() <= 0.05, f"batch {int(gap.argmax())} misses by {gap.max():.4f}"


@pytest.mark.slow
def test_under_a_budget_no_prefixes_are_better() -> None:
    plans = {n: every_plan(n, 3, (NGRAM,))[1] for n in (1, 2, 3)}
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        rows, most = int(rng.integers(1, 4)), int(rng.integers(0, 11))
        survival, limit = rng.random((rows, 3)).cumprod(axis=1), rng.integers(0, 4, rows)
        k = keep_top(survival, limit, most)
        gain = np.concatenate([np.zeros((rows, 1)), survival.cumsum(axis=1)], axis=1)
        every = plans[rows]
        every = every[(every.sum(axis=1) <= most) & (every <= limit).all(axis=1)]
        assert k.sum() <= most, seed
        assert (k <= limit).all(), seed
        best = gain[np.arange(rows), every].sum(axis=1).max()
        assert gain[np.arange(rows), k].sum() == pytest.approx(best), seed


def test_no_budget_is_exceeded_before_or_after_drafting() -> None:
    for seed in range(400):
        rng = np.random.default_rng(seed)
        rows, most = int(rng.integers(1, 9)), int(rng.integers(0, 30))
        ids, edges = list(range(rows)), np.array([[], [8, 16, 64]][seed % 2], np.int32)
        survival = rng.random((rows, PROPOSERS, 8)).cumprod(axis=2).astype(np.float32)
        plan = plan_of(
            ids,
            rng.integers(0, PROPOSERS, rows).tolist(),
            rng.integers(0, 9, rows).tolist(),
            survival=survival if seed % 3 else None,
            budget_tokens=most,
        )
        plan = dataclasses.replace(plan, token_value_ms=10.0 if seed % 5 else float("nan"))
        view = view_of(ids, bucket_edges=edges, max_k=rng.integers(0, 12, rows).astype(np.int32))
        fit = fit_plan(plan, view)
        assert fit.verify_k.sum() <= most
        assert fit.k.sum() <= max(most, plan.k.sum())
        drafted = rng.integers(0, 9, rows).astype(np.int32)
        confidences = rng.random((rows, 8)).astype(np.float32)
        after = fit_plan(plan, view, drafted, confidences).verify_k
        assert after.sum() <= most
        assert (after <= drafted).all()


@pytest.mark.slow
def test_more_survival_never_means_less_k_at_one_budget() -> None:
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        rows, most = int(rng.integers(2, 6)), int(rng.integers(0, 13))
        survival, limit = rng.random((rows, 4)).cumprod(axis=1), np.full(rows, 4)
        before = keep_top(survival, limit, most)
        row = int(rng.integers(rows))
        survival[row] = survival[row] ** rng.uniform(0.2, 1.0)
        assert keep_top(survival, limit, most)[row] >= before[row], seed


def raised(seed: int, staircase: bool) -> tuple[int, int]:
    """Return one row's k before and after all its hazards fall alike; proposers are fixed."""
    rng = np.random.default_rng(seed)
    proposer = (NGRAM, DRAFT_MODEL)[seed % 2]
    survival = random_survival(rng, 3, 4, [proposer])
    costs = random_costs(rng, 3, 12, staircase)
    costs.switch_ms[:] = 0.0
    if not staircase:
        costs.verify_ms[1:] = costs.verify_ms[0] + np.sort(np.diff(costs.verify_ms)).cumsum()
    before = best_plan(survival, costs, 3.0).k
    row = int(rng.integers(3))
    survival[row] = survival[row] ** rng.uniform(0.2, 1.0)
    return int(before[row]), int(best_plan(survival, costs, 3.0).k[row])


@pytest.mark.slow
@pytest.mark.parametrize("staircase", [False, True])
def test_more_survival_never_means_less_k_at_the_best_goodput(staircase: bool) -> None:
    for seed in range(BATCHES // 2):
        before, after = raised(seed, staircase)
        assert after >= before, f"batch {seed}: k {before} became {after}"
