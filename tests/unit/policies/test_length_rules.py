"""Baselines that learn a length: by match, by goodput of the batch, by a confidence threshold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policies.synthetic import LIMITS, Machine, play
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import view_of

from parlay.policies.baselines.hf_confidence import best_threshold
from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, NGRAM, NONE, Array, ShadowKind, ShadowRows, StopKind


def matched(length: int) -> Array:
    return np.array([length], np.int32)


def test_suffix_length_drafts_no_deeper_than_the_match_or_its_record() -> None:
    policy = make_policy("suffix_length", {}, LIMITS)
    fresh = [int(policy.decide(view_of([1], match_tokens=matched(n))).k[0]) for n in (0, 1, 2, 9)]
    assert fresh == [0, 1, 2, 3], "a half for each place at first: .5, .25, .125 and no more"
    ids, ngram = np.array([1]), np.full(1, NGRAM)
    for _ in range(40):
        policy.observe(outcome_of(ids, ngram, np.array([8]), np.array([8]), match=12))
        policy.observe(outcome_of(ids, ngram, np.array([2]), np.array([0]), match=2))
    # Eight places always held; those behind them, never seen, count a half each.
    assert policy.decide(view_of([1], match_tokens=matched(12))).k.tolist() == [11]
    assert policy.decide(view_of([1], match_tokens=matched(2))).k.tolist() == [0]


def test_suffix_length_learns_from_shadows() -> None:
    policy = make_policy("suffix_length", {}, LIMITS)
    shadow = ShadowRows(
        request_id=np.array([1], np.uint64), proposer=np.array([NGRAM], np.uint8),
        offered_k=np.array([4], np.int16), matched=np.array([0.0], np.float32),
        observed=np.array([4], np.int16), match_tokens=np.array([5], np.int32),
        kind=np.array([ShadowKind.MATCH], np.uint8),
    )  # fmt: skip
    none = np.zeros(1, np.int64)
    for _ in range(40):
        policy.observe(outcome_of(np.array([1]), np.full(1, NONE), none, none, shadow=shadow))
    assert policy.decide(view_of([1], match_tokens=matched(5))).k.tolist() == [0]
    again = make_policy("suffix_length", {}, LIMITS)
    again.load(policy.state())
    assert np.array_equal(again.state()["counts"], policy.state()["counts"])


@pytest.mark.parametrize(("draft_pass", "deep"), [(0.01, True), (0.9, False)])
def test_goodput_batch_weighs_tokens_against_time(draft_pass: float, deep: bool) -> None:
    policy = make_policy("goodput_batch", {}, LIMITS)
    played = play(policy, ["chat"] * 2, 200, machine=Machine(draft_pass=draft_pass))
    late = [int(plan.k.max()) for plan in played.plans[100:]]
    assert np.mean(late) > 1.5 if deep else np.mean(late) < 0.5


def test_goodput_batch_scores_every_ten_batches_and_is_saved_whole() -> None:
    policy = make_policy("goodput_batch", {}, LIMITS)
    ks = [int(plan.k[0]) for plan in play(policy, ["chat"] * 4, 60).plans]
    assert all(len(set(ks[i : i + 10])) == 1 for i in range(0, 60, 10))
    again = make_policy("goodput_batch", {}, LIMITS)
    again.load(policy.state())
    one, two = (play(p, ["edit"] * 3, 30, seed=4).plans for p in (policy, again))
    assert [p.k.tolist() for p in one] == [p.k.tolist() for p in two]


@given(
    st.lists(
        st.tuples(st.sampled_from([0.1, 0.3, 0.5, 0.7]), st.booleans()), min_size=1, max_size=20
    )
)
def test_the_best_threshold_is_no_worse_than_any_other(tokens: list[tuple[float, bool]]) -> None:
    confidence, good = np.array([c for c, _ in tokens]), np.array([g for _, g in tokens])

    def cost(threshold: float) -> float:
        called = confidence >= threshold
        wrong = (called & ~good).sum() / max((~good).sum(), 1)
        return float(wrong + 3 * (~called & good).sum() / max(good.sum(), 1))

    best = cost(best_threshold(confidence, good))
    assert all(best <= cost(t) + 1e-12 for t in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0))


def test_hf_confidence_moves_its_threshold_to_what_tells_good_from_bad() -> None:
    policy, rng = make_policy("hf_confidence", {}, LIMITS), np.random.default_rng(2)
    rule = policy.decide(view_of([1])).stop_rule
    assert (rule.kind, rule.threshold) == (StopKind.PROBABILITY, 0.4)
    ids, draft = np.array([1]), np.full(1, DRAFT_MODEL)
    for _ in range(300):
        good = rng.random(3) < 0.6
        accepted = int(np.cumprod(good).sum())
        outcome = outcome_of(ids, draft, np.array([3]), np.array([accepted]))
        outcome.confidences[0, :3] = np.where(good, 0.8, 0.6) + rng.normal(0, 0.02, 3)
        policy.observe(outcome)
    threshold = policy.decide(view_of([1])).stop_rule.threshold
    assert 0.62 < threshold < 0.78
    again = make_policy("hf_confidence", {}, LIMITS)
    again.load(policy.state())
    assert again.decide(view_of([1])).stop_rule.threshold == threshold
    fixed = make_policy("hf_confidence", {"online": "false"}, LIMITS)
    fixed.observe(outcome)
    assert fixed.decide(view_of([1])).stop_rule.threshold == 0.4
