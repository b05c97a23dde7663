"""HedgeSpec: full information over proposers, each request's own best, regret that stays small."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.unit.policies.synthetic import LIMITS
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import view_of

from parlay.policies.bandits.hedge_spec import expected_tokens, normal_hedge
from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, NGRAM, Array, PlanSource, ShadowKind, ShadowRows

K = 4
HOLD = {"edit": {NGRAM: 0.9, DRAFT_MODEL: 0.5}, "chat": {NGRAM: 0.3, DRAFT_MODEL: 0.7}}


@given(arrays.arrays(float, st.integers(1, 8), elements=st.floats(0.0, 1.0)))
def test_the_estimate_is_one_plus_the_survivals(accept: Array) -> None:
    assert expected_tokens(accept) == pytest.approx(1.0 + np.cumprod(accept).sum())


@given(arrays.arrays(float, (3, 4), elements=st.floats(-50.0, 50.0)))
def test_normal_hedge_meets_its_condition(regret: Array) -> None:
    weight = normal_hedge(regret)
    assert weight.sum(axis=1) == pytest.approx(np.ones(3))
    for r, w in zip(np.maximum(regret, 0.0), weight, strict=True):
        if r.max() < 1e-6:
            continue
        assert (w[r == 0.0] == 0.0).all()
        # The c that the weights of the two largest betray gives a mean of e.
        place = np.argsort(-r)[:2]
        a, b = r[place]
        if b > 1e-3 and a > b * 1.001 and w[place[1]] > 1e-12:
            c = (a**2 - b**2) / 2 / math.log(w[place[0]] / w[place[1]] * b / a)
            assert np.exp(r**2 / 2 / c).mean() == pytest.approx(math.e, rel=1e-2)
    assert normal_hedge(np.full((1, 4), -3.0)) == pytest.approx(np.full((1, 4), 0.25))


def shadows(ids: Array, proposer: Array, held: Array, kind: ShadowKind) -> ShadowRows:
    rows = len(ids)
    return ShadowRows(
        request_id=ids, proposer=proposer.astype(np.uint8),
        offered_k=np.full(rows, K, np.int16), matched=held.astype(np.float32),
        observed=np.minimum(held + 1, K).astype(np.int16),
        match_tokens=np.full(rows, 5, np.int32), kind=np.full(rows, kind, np.uint8),
    )  # fmt: skip


def decode(policy: Any, steps: int, lag: int = 0, seed: int = 0) -> tuple[Array, Array]:
    """Decode two requests that edit and two that chat, where every proposer is always seen.

    Returns bool [steps, rows], who drafted with its task's best, and how many tokens each of the
    two proposers would have brought, f64 [steps, rows, 2].
    """
    rng, tags, waiting = np.random.default_rng(seed), ["edit", "chat"] * 2, []
    hold = np.array([[HOLD[t][NGRAM], HOLD[t][DRAFT_MODEL]] for t in tags])
    best = np.array([NGRAM, DRAFT_MODEL])[hold.argmax(axis=1)]
    good, brought = [], []
    for step in range(steps):
        view = view_of([1, 2, 3, 4])
        view.step_id = step
        plan = policy.decide(view)
        held = np.cumprod(rng.random((4, 2, K)) < hold[:, :, None], axis=2).sum(axis=2)
        column = plan.proposer.astype(int) - NGRAM
        accepted = held[np.arange(4), column]
        other = np.array([DRAFT_MODEL, NGRAM])[column]
        shadow = shadows(view.request_id, other, held[np.arange(4), 1 - column], ShadowKind.MATCH)
        outcome = outcome_of(view.request_id, plan.proposer, plan.k, accepted, 5, shadow)
        outcome.plan_step_id[:], outcome.plan_source[:] = step, PlanSource.LOCAL
        waiting.append(outcome)
        if len(waiting) > lag:
            policy.observe(waiting.pop(0))
        good.append(plan.proposer == best)
        brought.append(held + 1.0)
    return np.array(good), np.array(brought)


@pytest.mark.parametrize("lag", [0, 3])
def test_each_request_soon_drafts_with_its_own_best(lag: int) -> None:
    good, _ = decode(make_policy("hedge_spec", {}, LIMITS), 300, lag)
    assert good[40:].mean() > 0.93
    assert good[40:].mean(axis=0).min() > 0.85, "every request, not one side of them"


def test_regret_stays_within_the_sources_bound() -> None:
    policy: Any = make_policy("hedge_spec", {}, LIMITS)
    steps = 400
    _, brought = decode(policy, steps)
    # NormalHedge: sqrt(3 T (1 + ln N)) and a constant, losses in [0, 1].
    regret = policy.state()["record"][:, 0]
    assert regret.max() < math.sqrt(3 * steps * (1 + math.log(2))) < 0.2 * steps
    # The regrets' difference is what one proposer brought more than the other.
    apart = (brought[:, :, 0] - brought[:, :, 1]).sum(axis=0) / K
    assert regret[:, 0] - regret[:, 1] == pytest.approx(apart, abs=1.0)


def test_a_shadow_alone_teaches_and_is_asked_for() -> None:
    policy = make_policy("hedge_spec", {}, LIMITS)
    plan = policy.decide(view_of([1]))
    assert plan.shadow.tolist() == [plan.proposer[0] == NGRAM]
    ids, nothing = np.array([1], np.uint64), np.zeros(1, np.int64)
    for kind in ShadowKind:
        for _ in range(30):
            shown = shadows(ids, np.array([DRAFT_MODEL]), np.array([3]), kind)
            outcome = outcome_of(ids, nothing, nothing, nothing, 0, shown)
            policy.observe(outcome)
        chosen = [int(policy.decide(view_of([1])).proposer[0]) for _ in range(50)]
        assert np.mean(np.array(chosen) == DRAFT_MODEL) > 0.95, kind


def test_an_overlap_is_a_mean_acceptance_of_every_place_that_was_seen() -> None:
    policy: Any = make_policy("hedge_spec", {"k": 3}, LIMITS)
    policy.decide(view_of([1]))
    shown = shadows(
        np.array([1], np.uint64), np.array([DRAFT_MODEL]), np.array([0]), ShadowKind.OVERLAP
    )
    shown.matched[:], shown.observed[:] = 1.2, 3
    nothing = np.zeros(1, np.int64)
    policy.observe(outcome_of(np.array([1]), nothing, nothing, nothing, 5, shown))
    expected = 1 + 0.4 + 0.4**2 + 0.4**3
    assert policy.known.get(1).latest[1] == pytest.approx(expected, rel=1e-5)


def test_one_guess_values_every_round_it_reaches_over() -> None:
    policy: Any = make_policy("hedge_spec", {"k": 3}, LIMITS)
    policy.decide(view_of([1]))
    policy.reported[:], policy.seen[:] = True, 1e9  # what is not seen never holds
    ids, ngram = np.array([1], np.uint64), np.array([NGRAM])
    decided = shadows(ids, np.array([DRAFT_MODEL]), np.array([2]), ShadowKind.MATCH)
    for told, waiting in ((None, 1), (None, 2), (decided, 0)):
        policy.observe(outcome_of(ids, ngram, np.array([1]), np.array([0]), 5, told))
        assert len(policy.known.get(1).rounds) == waiting
        again: Any = make_policy("hedge_spec", {"k": 3}, LIMITS)
        again.load(policy.state())
        for name, array in policy.state().items():
            np.testing.assert_array_equal(again.state()[name], array, err_msg=name)
    # Of the guess 2, 1 and 0 tokens were left to hold in the three rounds, of the n-gram's none.
    assert policy.known.get(1).regret == pytest.approx([-1 / 3 - 1 / 6, 1 / 3 + 1 / 6], abs=1e-6)


def test_a_proposer_that_is_never_scored_keeps_no_round_waiting() -> None:
    policy: Any = make_policy("hedge_spec", {}, LIMITS)
    policy.decide(view_of([1]))
    ids, ngram = np.array([1], np.uint64), np.array([NGRAM])
    policy.observe(outcome_of(ids, ngram, np.array([4]), np.array([4]), 5))
    assert not policy.known.get(1).rounds
    assert policy.known.get(1).regret[0] > 0.0


def test_a_loaded_policy_draws_alike() -> None:
    policy, again = (make_policy("hedge_spec", {}, LIMITS) for _ in range(2))
    decode(policy, 50)
    again.load(policy.state())
    assert decode(policy, 30, seed=3)[0].tolist() == decode(again, 30, seed=3)[0].tolist()
    with pytest.raises(ValueError, match="another policy"):
        make_policy("hedge_spec", {"k": 2}, LIMITS).load(policy.state())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"proposers": ("ngram",)}, "two or more, all different"),
        ({"proposers": "ngram,oracle"}, "unknown proposer 'oracle'"),
        ({"k": 0}, "k must be between 1 and 64, not 0"),
        ({"seed": -2}, "seed must be 0 or more"),
    ],
)
def test_bad_settings_get_one_clear_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy("hedge_spec", settings, LIMITS)
