"""The solver against brute force, and against the closed forms of the iid model."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parlay.policies.solver import StepCosts, _first, best_plan, priced, usable
from parlay.policies.synthetic import History
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, NONE, PROPOSERS, Array


def random_costs(rng: np.random.Generator, rows: int, most: int, staircase: bool) -> StepCosts:
    steps = rng.exponential(0.4, most)
    if staircase:
        steps *= rng.random(most) < 0.3
    verify = np.concatenate([[rng.uniform(3, 10)], steps]).cumsum()
    token_ms = np.zeros(PROPOSERS)
    token_ms[DRAFT_MODEL] = rng.uniform(0, 0.1)
    switch = rng.uniform(0, 0.5, rows) * (rng.random(rows) < 0.3)
    return StepCosts(verify, float(rng.uniform(0, 1.5)), token_ms, switch)


def random_survival(rng: np.random.Generator, rows: int, k: int, proposers: list[int]) -> Array:
    survival = np.zeros((rows, PROPOSERS, k))
    for proposer in proposers:
        survival[:, proposer] = rng.random((rows, k)).cumprod(axis=1)
        survival[rng.random(rows) < 0.2, proposer] = 0.0
    return survival


def brute_force(survival: Array, costs: StepCosts, proposers: list[int]) -> float:
    """Return the least ms per token over every (proposer, k) of every row."""
    rows, _, k_max = survival.shape
    choices = [(NONE, 0)] + [(p, k) for p in proposers for k in range(1, k_max + 1)]
    best = np.inf
    for plan in itertools.product(choices, repeat=rows):
        total = sum(k for _, k in plan)
        if total >= len(costs.verify_ms):
            continue
        tokens = rows + sum(survival[row, p, :k].sum() for row, (p, k) in enumerate(plan))
        drafts = [(row, k) for row, (p, k) in enumerate(plan) if p == DRAFT_MODEL]
        ms = costs.verify_ms[total] + costs.pass_ms * max((k for _, k in drafts), default=0)
        ms += sum(costs.token_ms[p] * k for p, k in plan)
        ms += costs.heads_ms * any(p == MEDUSA for p, _ in plan)
        ms += sum(costs.switch_ms[row] for row, _ in drafts)
        best = min(best, ms / tokens)
    return float(best)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([NGRAM, DRAFT_MODEL]), st.booleans())
def test_fixed_proposers_equal_brute_force(seed: int, proposer: int, staircase: bool) -> None:
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, 3, 3, [proposer])
    costs = random_costs(rng, 3, 9, staircase)
    costs.switch_ms[:] = 0.0
    found = best_plan(survival, costs, 3.0)
    assert found.ms_per_token == pytest.approx(brute_force(survival, costs, [proposer]), rel=1e-9)


def test_choosing_proposers_comes_close_to_brute_force() -> None:
    gaps = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        survival = random_survival(rng, 3, 3, [NGRAM, DRAFT_MODEL])
        costs = random_costs(rng, 3, 9, staircase=bool(seed % 2))
        found = best_plan(survival, costs, 3.0).ms_per_token
        gaps.append(found / brute_force(survival, costs, [NGRAM, DRAFT_MODEL]) - 1.0)
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.002
    assert max(gaps) < 0.05


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 100_000), st.integers(0, 9), st.floats(1.0, 2.0), st.booleans())
def test_one_row_equals_brute_force(seed: int, most: int, emits: float, padded: bool) -> None:
    rng = np.random.default_rng(seed)
    proposers = [NGRAM, DRAFT_MODEL, MEDUSA]
    survival = random_survival(rng, 1, 6, proposers)
    costs = random_costs(rng, 1, most, staircase=bool(seed % 2))
    costs.token_ms[NGRAM], costs.token_ms[MEDUSA] = rng.uniform(0, 0.3, 2)
    costs = dataclasses.replace(costs, pad_ms=float(padded) * float(rng.uniform(0, 0.1)))
    found = best_plan(survival, costs, emits)
    every = {(NONE, 0): costs.verify_ms[0] / emits}
    for proposer, k in itertools.product(proposers, range(1, min(6, most) + 1)):
        ms = costs.verify_ms[k] + costs.token_ms[proposer] * k + costs.pad_ms * (emits - 1.0) * k
        if proposer == DRAFT_MODEL:
            ms += costs.pass_ms * k + costs.switch_ms[0]
        every[proposer, k] = ms / (emits + survival[0, proposer, :k].sum())
    proposer, k = int(found.proposer[0]), int(found.k[0])
    assert found.ms_per_token == pytest.approx(min(every.values()), rel=1e-9)
    assert every[proposer, k] == pytest.approx(found.ms_per_token, rel=1e-9)
    assert found.depth == (k if proposer == DRAFT_MODEL else 0)
    if k:
        # At the plan's own prices the row drafts as deep as planned.
        gain = found.ms_per_token * survival[0, proposer] - costs.token_ms[proposer]
        assert gain[k - 1] >= found.price_ms - 1e-9
        if proposer != DRAFT_MODEL and k < min(6, most):
            assert gain[k] < found.price_ms or gain[k] == pytest.approx(gain[k - 1])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 6), st.integers(1, 5))
def test_of_equal_places_the_first_rows_get_theirs(seed: int, rows: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    net = np.sort(rng.integers(1, 4, (depth, rows)), axis=0)[::-1].astype(float)
    budget = int(rng.integers(1, net.size + 1))
    ranked = np.sort(net.ravel())[::-1]
    k = _first(net, ranked[budget - 1], budget)
    order = sorted((-net[j, row], row, j) for j in range(depth) for row in range(rows))
    taken = [row for _, row, _ in order[:budget]]
    assert k.tolist() == np.bincount(taken, minlength=rows).tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20))
def test_the_plan_adds_up_and_keeps_the_budget(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, 5, 4, [NGRAM, DRAFT_MODEL])
    costs = random_costs(rng, 5, most, staircase=True)
    found = best_plan(survival, costs, 5.0)
    assert int(found.k.sum()) <= most
    row = np.arange(5)
    taken = np.arange(4) < found.k[:, None]
    tokens = 5.0 + (survival[row, found.proposer] * taken).sum()
    assert found.emitted_tokens == pytest.approx(tokens)
    assert found.ms_per_token <= costs.verify_ms[0] / 5.0 + 1e-12
    assert found.depth == max(found.k[found.proposer == DRAFT_MODEL], default=0)
    assert ((found.k == 0) == (found.proposer == NONE)).all()
    assert np.isfinite(found.price_ms)


def test_a_first_guess_changes_nothing() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        survival = random_survival(rng, 4, 4, [DRAFT_MODEL])
        costs = random_costs(rng, 4, 16, staircase=False)
        costs.switch_ms[:] = 0.0
        plain = best_plan(survival, costs, 4.0)
        for factor in (0.3, 0.9, 3.0):
            guess = best_plan(survival, costs, 4.0, plain.ms_per_token * factor)
            assert guess.ms_per_token == pytest.approx(plain.ms_per_token, rel=1e-9)


BEST_K = {
    0.02: [(4, 1.794), (6, 2.170), (8, 2.758), (11, 3.817), (19, 6.365)],
    0.05: [(3, 1.630), (4, 1.921), (5, 2.353), (8, 3.092), (13, 4.674)],
    0.1: [(2, 1.458), (3, 1.674), (4, 1.981), (6, 2.470), (10, 3.431)],
    0.2: [(1, 1.250), (2, 1.400), (3, 1.583), (4, 1.868), (7, 2.373)],
    0.5: [(0, 1.0), (1, 1.067), (1, 1.133), (2, 1.220), (3, 1.376)],
}


@pytest.mark.parametrize("cost", BEST_K)
def test_best_k_of_the_iid_model(cost: float) -> None:
    for alpha, (k, speed) in zip((0.5, 0.6, 0.7, 0.8, 0.9), BEST_K[cost], strict=True):
        survival = np.zeros((1, PROPOSERS, 24))
        survival[0, DRAFT_MODEL] = alpha ** np.arange(1, 25)
        costs = StepCosts(np.ones(25), cost, np.zeros(PROPOSERS), np.zeros(1))
        found = best_plan(survival, costs, 1.0)
        every = (1 - alpha ** np.arange(1, 26)) / (1 - alpha) / (cost * np.arange(25) + 1)
        ties = np.flatnonzero(every > every.max() - 1e-5).tolist()
        assert {k, int(found.k[0])} <= set(ties)
        assert 1.0 / found.ms_per_token == pytest.approx(speed, abs=6e-4)


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"), [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 10, 6.86)]
)
def test_tokens_of_the_iid_model(alpha: float, k: int, tokens: float) -> None:
    survival = np.zeros((1, PROPOSERS, k))
    survival[0, DRAFT_MODEL] = alpha ** np.arange(1, k + 1)
    free = StepCosts(np.ones(k + 1), 0.0, np.zeros(PROPOSERS), np.zeros(1))
    found = best_plan(survival, free, 1.0)
    assert int(found.k[0]) == k
    assert found.emitted_tokens == pytest.approx(tokens, abs=6e-3)
    assert found.emitted_tokens == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_a_shared_draft_pass_is_not_started_for_one_row() -> None:
    survival = np.zeros((8, PROPOSERS, 4))
    survival[0, DRAFT_MODEL] = 0.5 ** np.arange(1, 5)
    costs = StepCosts(10.0 + 0.1 * np.arange(33), 1.0, np.zeros(PROPOSERS), np.zeros(8))
    assert best_plan(survival, costs, 8.0).depth == 0
    survival[:, DRAFT_MODEL] = survival[0, DRAFT_MODEL]
    assert best_plan(survival, costs, 8.0).depth > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pass_of_the_heads_is_paid_once_or_not_at_all(rows: int) -> None:
    gaps, by_heads = [], 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        survival = random_survival(rng, rows, 3, [NGRAM, MEDUSA])
        costs = random_costs(rng, rows, 3 * rows, staircase=False)
        costs = dataclasses.replace(costs, heads_ms=float(rng.uniform(0.0, 4.0)))
        found = best_plan(survival, costs, float(rows))
        by_heads += bool((found.proposer == MEDUSA).any())
        gaps.append(found.ms_per_token / brute_force(survival, costs, [NGRAM, MEDUSA]) - 1.0)
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.005
    assert max(gaps) < 0.05
    assert 20 < by_heads < 80, "some pay, some do not"


def test_where_rows_are_padded_one_row_goes_less_deep_ahead_of_the_others() -> None:
    survival = np.zeros((16, PROPOSERS, 12))
    survival[:, NGRAM, :3] = (0.95, 0.9, 0.85)
    survival[0, NGRAM] = 0.95 ** np.arange(1, 13)
    verify_ms = 20.0 + 0.2 * np.arange(16 * 12 + 1)
    flat = StepCosts(verify_ms, 1.0, np.zeros(PROPOSERS), np.zeros(16))
    padded = dataclasses.replace(flat, pad_ms=0.05)
    free, dear = best_plan(survival, flat, 16.0), best_plan(survival, padded, 16.0)
    assert free.k[0] == 12
    assert 0 < dear.k.max() < 12
    # The plan's time has the padding in it, and going as deep as before would be worse.
    rows_short = 16 * int(dear.k.max()) - int(dear.k.sum())
    assert dear.step_ms == pytest.approx(verify_ms[dear.k.sum()] + 0.05 * rows_short)
    as_before = priced(survival, padded, 16.0, free.proposer, free.k, 0.0)
    assert dear.ms_per_token < as_before.ms_per_token


@pytest.mark.parametrize("prefill", [0, 7])
@pytest.mark.parametrize("mask", [0b0001, 0b0111, 0b1011])
@pytest.mark.parametrize("max_k", [0, 2, 9])
def test_a_batch_of_one_may_draft_what_it_may_among_others(
    prefill: int, mask: int, max_k: int
) -> None:
    survival = random_survival(np.random.default_rng(0), 1, 4, [NGRAM, DRAFT_MODEL, MEDUSA])
    two = History(2).view()
    two.prefill_tokens[:], two.proposer_mask[:], two.max_k[:] = prefill, mask, max_k
    one = History(1).view()
    one.prefill_tokens[:], one.proposer_mask[:], one.max_k[:] = prefill, mask, max_k
    among = usable(two, np.concatenate([survival, survival]))
    np.testing.assert_array_equal(usable(one, survival), among[:1])
