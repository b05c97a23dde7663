"""Off-policy evaluation: closed forms, exact replay, support, and intervals that hold."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policies.coupled import ARMS, TASKS, Exploring, Fixed, goodput, run, step_ms

from parlay.policies.acceptance import channel_of
from parlay.policies.estimators import (
    Choices,
    Model,
    Rows,
    doubly_robust,
    effective_size,
    expected_held,
    fit_model,
    ips,
    known_tokens,
    occupancy,
    replayed_tokens,
    snips,
    weights,
)
from parlay.policies.evaluate import ESTIMATORS, Estimate, evaluate
from parlay.policies.log_schema import LoggedStep
from parlay.policies.policy import EngineLimits, Policy, make_policy
from parlay.policies.replay import learned_cost, replay, shared_ms
from parlay.policies.types import DRAFT_MODEL, NGRAM, NONE, PROPOSERS, Array, BatchView

BY_TASK = {11: (NGRAM, 5), 22: (DRAFT_MODEL, 5), 33: (NONE, 0)}
SHALLOW = dict.fromkeys(TASKS, (DRAFT_MODEL, 3))
STEPS = 300


def rows_with(
    proposer: Array,
    verified: Array,
    accepted: Array,
    request: Array | None = None,
    ends: Array | None = None,
    emitted: Array | None = None,
) -> Rows:
    count = len(proposer)
    return Rows(
        request=np.zeros(count, np.intp) if request is None else request,
        turn=np.arange(count),
        task=np.zeros(count, np.intp),
        channel=channel_of(proposer, np.full(count, 4)),
        ngram_channel=channel_of(np.full(count, NGRAM), np.full(count, 4)),
        young=np.zeros(count, bool),
        proposer=proposer,
        verified=verified,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        ends=np.zeros(count, bool) if ends is None else ends,
        forced=np.zeros(count, bool),
        propensity=np.ones(count),
    )


def drafted(count: int, seed: int, chance: float, depth: int = 6) -> tuple[Array, Array]:
    """Return (k, how many of `depth` drafts would hold), i64 [count] each."""
    rng = np.random.default_rng(seed)
    held = np.cumprod(rng.random((count, depth)) < chance, axis=1).sum(axis=1)
    return rng.integers(0, depth + 1, count), held


@functools.lru_cache(2)
def log(seed: int, steps: int = STEPS) -> list[LoggedStep]:
    return run(Exploring(seed), steps, seed)


def on(log: list[LoggedStep], by_task: Mapping[int, tuple[int, int]]) -> dict[str, Estimate]:
    return evaluate(lambda _: Fixed(by_task), log, step_ms)


# Closed forms. Two contexts, two actions; the formulas of the Open Bandit Pipeline's estimators
# (Saito et al. 2020, arXiv:2008.07146) worked out by hand.

REWARD = np.array([3.0, 1.0, 2.0, 4.0])
LOGGED = np.array([0.25, 0.75, 0.5, 0.5])
WANTED = np.array([0.5, 0.5, 0.0, 1.0])
WEIGHT = np.array([2.0, 2.0 / 3.0, 0.0, 2.0])


def test_inverse_propensity_scores_match_the_closed_form() -> None:
    np.testing.assert_allclose(WANTED / LOGGED, WEIGHT)
    assert ips(REWARD, WEIGHT) == pytest.approx((6.0 + 2.0 / 3.0 + 0.0 + 8.0) / 4.0)
    assert snips(REWARD, WEIGHT) == pytest.approx((44.0 / 3.0) / (14.0 / 3.0))
    assert effective_size(WEIGHT) == pytest.approx((14.0 / 3.0) ** 2 / (8.0 + 4.0 / 9.0))


def test_doubly_robust_matches_the_closed_form() -> None:
    direct, direct_logged = np.array([2.0, 2.0, 3.0, 3.0]), np.array([2.5, 1.5, 2.0, 3.5])
    found = doubly_robust(REWARD, WEIGHT, direct, direct_logged)
    np.testing.assert_allclose(found, [3.0, 5.0 / 3.0, 3.0, 4.0])
    exact = doubly_robust(REWARD, WEIGHT, direct, REWARD)
    np.testing.assert_allclose(exact, direct)  # a perfect model needs no correction
    np.testing.assert_allclose(
        doubly_robust(REWARD, WEIGHT, np.zeros(4), np.zeros(4)).mean(), ips(REWARD, WEIGHT)
    )


@given(st.integers(0, 1000))
def test_both_are_unbiased_over_the_draws_of_the_log(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logged, wanted = rng.dirichlet(np.ones(3) * 3.0), rng.dirichlet(np.ones(3))
    reward, model = rng.random(3), rng.random(3)
    weight = wanted / logged
    truth = float(wanted @ reward)
    assert float(logged @ (weight * reward)) == pytest.approx(truth)
    direct = np.full(3, float(wanted @ model))
    assert float(logged @ doubly_robust(reward, weight, direct, model)) == pytest.approx(truth)


def test_weights_are_one_over_the_propensity_where_both_chose_the_same() -> None:
    rows = rows_with(np.full(4, DRAFT_MODEL), np.full(4, 2), np.full(4, 1))
    rows.propensity = np.array([0.25, 0.5, np.nan, 0.5])
    rows.forced = np.array([False, False, False, True])
    choices = Choices(rows.proposer, rows.verified, np.array([True, False, True, False]))
    np.testing.assert_array_equal(weights(rows, choices), [4.0, 0.0, 0.0, 1.0])


# What censored feedback tells.


@given(st.integers(0, 1000), st.floats(0.1, 0.95))
def test_the_replay_tells_every_shorter_k_exactly_and_every_k_after_a_rejection(
    seed: int, chance: float
) -> None:
    verified, held = drafted(40, seed, chance)
    who = np.where(verified > 0, DRAFT_MODEL, NONE)
    rows = rows_with(who, verified, np.minimum(held, verified))
    wanted = np.random.default_rng([seed, 1]).integers(0, 7, 40)
    choices = Choices(np.where(wanted > 0, DRAFT_MODEL, NONE), wanted, np.zeros(40, bool))
    told, whole = known_tokens(rows, choices)
    truth = np.minimum(held, wanted) + 1
    np.testing.assert_array_equal(told[whole], truth[whole])
    assert (told <= truth).all()
    np.testing.assert_array_equal(
        whole, (wanted <= verified) | ((held < verified) & (verified > 0))
    )


def test_another_proposer_tells_one_token_and_the_end_of_a_request_caps() -> None:
    who = np.array([NGRAM, DRAFT_MODEL, DRAFT_MODEL, NGRAM])
    rows = rows_with(
        who,
        np.array([3, 3, 3, 3]),
        np.array([2, 3, 3, 3]),
        ends=np.array([False, True, True, True]),
        emitted=np.array([3, 2, 4, 1]),
    )
    choices = Choices(np.full(4, DRAFT_MODEL), np.array([2, 5, 1, 2]), np.zeros(4, bool))
    told, whole = known_tokens(rows, choices)
    np.testing.assert_array_equal(told, [1, 2, 2, 1])
    np.testing.assert_array_equal(whole, [False, True, True, True])


def test_what_censoring_hides_is_filled_in_with_the_hazards() -> None:
    rows = rows_with(np.full(3, DRAFT_MODEL), np.array([2, 2, 2]), np.array([2, 1, 2]))
    choices = Choices(np.full(3, DRAFT_MODEL), np.array([4, 4, 2]), np.zeros(3, bool))
    model = Model(np.full((40, 4), 0.25), np.ones((1, PROPOSERS)))
    tokens, hidden = replayed_tokens(rows, choices, model)
    np.testing.assert_allclose(hidden, [0.75 + 0.75**2, 0.0, 0.0])
    np.testing.assert_allclose(tokens, [3.0 + 0.75 + 0.75**2, 2.0, 3.0])
    model.frailty[0, DRAFT_MODEL] = 2.0
    assert expected_held(
        rows, model, rows.proposer, np.zeros(3, int), np.array([2, 0, 1])
    ).tolist() == [0.75, 0.0, 0.5]


def test_the_model_finds_hazards_though_k_was_chosen_from_each_request_s_history() -> None:
    rng = np.random.default_rng(4)
    hard = rng.gamma(6.0, 1.0 / 6.0, (400, 1))
    held = rng.geometric(np.minimum(0.3 * hard, 0.98), (400, 30)) - 1
    accepted_before: Array = np.cumsum(held > 0, axis=1) - (held > 0)
    verified = np.where(accepted_before > 0.75 * np.arange(30), 4, 1)
    verified[:, 0] = 1
    request = np.repeat(np.arange(400), 30)
    verified, held = verified.ravel(), held.ravel()
    who = np.full(len(request), DRAFT_MODEL)
    rows = rows_with(who, verified, np.minimum(held, verified), request=request)
    model = fit_model(rows, 5, np.ones(len(rows), bool))
    deep = (verified == 4) & (held >= 2)
    naive = float((held[deep] == 2).mean())
    cell = int(channel_of(np.array([DRAFT_MODEL]), np.zeros(1))[0]) * 2
    assert abs(model.hazard[cell, 2] - 0.3) < 0.4 * abs(naive - 0.3)
    assert model.hazard[cell, 0] == pytest.approx(0.3, abs=0.02)
    assert np.corrcoef(model.frailty[:, DRAFT_MODEL], hard[:, 0])[0, 1] > 0.8


def test_a_row_is_laid_what_its_own_drafts_cost_and_shares_the_rest() -> None:
    view = run(Fixed(SHALLOW), 1, 1)[0].view
    who = np.array([DRAFT_MODEL] * 2 + [NGRAM] * 2 + [NONE] * 12)
    k = np.array([3, 3, 2, 5] + [0] * 12)

    def linear(view: BatchView, proposer: Array, drafted: Array) -> float:
        return 16.0 + 0.5 * float(drafted.sum())

    share_ms = shared_ms(view, who, k, linear)
    np.testing.assert_allclose(share_ms, 1.0 + 0.5 * k + 0.5 * (k.sum() - 16 * k.mean()) / 16)

    def deepest(view: BatchView, proposer: Array, drafted: Array) -> float:
        return 16.0 + float(drafted[proposer == DRAFT_MODEL].max(initial=0))

    np.testing.assert_allclose(shared_ms(view, who, k, deepest), 19.0 / 16.0)
    k[1] = 1
    share_ms = shared_ms(view, who, k, deepest)
    assert share_ms.sum() == pytest.approx(19.0)
    assert share_ms[0] - share_ms[1] == pytest.approx(2.0)


def test_rows_count_for_less_where_the_other_policy_takes_fewer_steps() -> None:
    verified, held = drafted(3000, 0, 0.8)
    verified = np.minimum(verified, 1)
    request = np.repeat(np.arange(100), 30)
    who = np.where(verified > 0, DRAFT_MODEL, NONE)
    rows = rows_with(who, verified, np.minimum(held, verified), request=request)
    rows.turn = np.tile(np.arange(30), 100)
    none = Choices(np.full(3000, NONE), np.zeros(3000, np.int64), np.zeros(3000, bool))
    one = Choices(np.full(3000, DRAFT_MODEL), np.ones(3000, np.int64), np.zeros(3000, bool))
    tau = 1.0 + (verified > 0).mean() * 0.8
    met = occupancy(rows, [none], fit_model(rows, 2, np.ones(3000, bool)))
    assert (met[::30] == 1.0).all()
    assert np.delete(met, np.s_[::30]).mean() == pytest.approx(tau, abs=0.03)
    met = occupancy(rows, [one], fit_model(rows, 2, np.ones(3000, bool)))
    assert np.delete(met, np.s_[::30]).mean() == pytest.approx(tau / 1.8, abs=0.03)


# On simulated logs.


def test_its_own_log_is_told_exactly() -> None:
    steps = run(Fixed(SHALLOW), 60, 3)
    measured = 1e3 * sum(int(s.outcome.emitted.sum()) for s in steps)
    measured /= sum(s.outcome.step_ms for s in steps)
    for name, found in on(steps, SHALLOW).items():
        assert found.goodput == pytest.approx(measured, rel=1e-6), name
        assert found.logged_goodput == pytest.approx(measured)
        assert found.low < measured < found.high
        assert found.unsupported == 0.0


def covered(logs: int, target: Mapping[int, tuple[int, int]], adaptive: bool) -> dict[str, int]:
    truth = goodput(lambda _: Fixed(target), STEPS, 40)
    hits = dict.fromkeys(ESTIMATORS, 0)
    for seed in range(logs):
        for name, found in on(run(Exploring(seed, adaptive), STEPS, seed), target).items():
            hits[name] += found.low <= truth <= found.high
            assert found.high - found.low < 0.25 * truth
    return hits


def test_intervals_hold_the_truth_on_a_few_logs() -> None:
    truth = goodput(lambda _: Fixed(BY_TASK), STEPS, 5)
    for name, found in on(log(1), BY_TASK).items():
        assert found.low < truth < found.high, name
        assert not found.low < found.logged_goodput < found.high, name


@pytest.mark.slow
@pytest.mark.parametrize("by_task", [BY_TASK, SHALLOW], ids=["by_task", "shallow"])
def test_intervals_hold_the_truth_in_90_of_100_logs(by_task: dict[int, tuple[int, int]]) -> None:
    hits = covered(100, by_task, adaptive=False)
    assert min(hits.values()) >= 90, hits


@pytest.mark.slow
def test_intervals_hold_the_truth_though_the_log_chose_k_by_history() -> None:
    hits = covered(100, BY_TASK, adaptive=True)
    assert min(hits.values()) >= 90, hits


def test_weights_are_normalised_by_themselves() -> None:
    steps = run(Exploring(1), 100, 1)
    for step in steps:
        step.fit.propensity = step.fit.propensity.copy()
    before = evaluate(lambda _: Fixed(SHALLOW), steps, step_ms, ("snips",))["snips"]
    for step in steps:
        step.fit.propensity /= 2.0
    after = evaluate(lambda _: Fixed(SHALLOW), steps, step_ms, ("snips",))["snips"]
    # Rows that could not draft keep their weight of 1.
    assert after.goodput == pytest.approx(before.goodput, rel=0.05)


def test_noise_of_the_steps_time_widens_the_interval() -> None:
    steps = run(Fixed(SHALLOW), 100, 1)
    quiet = on(steps, SHALLOW)["replay"]
    for step in steps[::10]:
        step.outcome.step_ms *= 20.0
    for step in steps[:50]:
        step.outcome.step_ms *= 2.0
    noisy = on(steps, SHALLOW)["replay"]
    assert (noisy.high - noisy.low) / noisy.goodput > 1.5 * (quiet.high - quiet.low) / quiet.goodput


def test_requests_that_were_there_before_the_log_have_no_first_step_in_it() -> None:
    steps = run(Fixed(SHALLOW), 30, 1)
    rows = replay([Fixed(SHALLOW)], steps, step_ms).rows
    output = np.concatenate([step.view.output_tokens for step in steps])
    np.testing.assert_array_equal(rows.turn[:16] > 0, output[:16] > 1)
    assert (rows.turn[output == 0] == 0).all()
    assert (output[:16] > 1).sum() > 10


def test_a_policy_that_draws_is_replayed_with_many_seeds() -> None:
    short = log(2, 100)
    found = evaluate(lambda seed: Exploring(900 + seed), short, step_ms, ("dr",), seeds=4)["dr"]
    assert found.low < found.logged_goodput < found.high
    assert found.unsupported < 0.1


def test_policies_that_learn_are_replayed_on_the_history() -> None:
    found = evaluate(
        lambda _: make_policy("goodput", None, EngineLimits(0b111, 5)),
        log(1, 100),
        step_ms,
        ("replay",),
    )["replay"]
    assert found.low < found.goodput < found.high
    assert found.goodput > found.logged_goodput


def test_the_learned_cost_ranks_as_the_true_one() -> None:
    steps = log(1, 200)
    cost = learned_cost(steps)
    real, learned = (replay([Fixed(SHALLOW)], steps, c) for c in (step_ms, cost))
    assert np.corrcoef(real.modelled_ms, learned.modelled_ms)[0, 1] > 0.9


def test_an_engine_that_restarts_counts_as_other_requests() -> None:
    first, second = run(Fixed(SHALLOW), 20, 1), run(Fixed(SHALLOW), 20, 2)
    ids = [len(np.unique(np.concatenate([s.view.request_id for s in p]))) for p in (first, second)]
    policies: list[Policy] = [Fixed(SHALLOW)]
    for step in second:
        step.engine = "other"
    assert replay(policies, first + second, step_ms).rows.request.max() + 1 == sum(ids)
    fresh = run(Fixed(SHALLOW), 20, 1)
    again = replay(policies, first + fresh, step_ms).rows
    assert again.request.max() + 1 > ids[0]


# Refusals.


def test_a_log_without_support_is_refused() -> None:
    never = dict.fromkeys(TASKS, (DRAFT_MODEL, 4))
    assert (DRAFT_MODEL, 4) not in ARMS
    for name in ("snips", "dr"):
        with pytest.raises(ValueError, match=r"never makes about .* choices .*such as exp3_spec"):
            evaluate(lambda _: Fixed(never), log(1, 100), step_ms, (name,))
    assert evaluate(lambda _: Fixed(never), log(1, 100), step_ms, ("replay",))


def test_the_replay_refuses_what_was_never_tried() -> None:
    shallow = run(Fixed(dict.fromkeys(TASKS, (DRAFT_MODEL, 1))), 60, 1)
    for untried in ((DRAFT_MODEL, 5), (NGRAM, 3)):
        policy = Fixed(dict.fromkeys(TASKS, untried))
        with pytest.raises(ValueError, match="were never tried in the log"):
            evaluate(lambda _, policy=policy: policy, shallow, step_ms, ("replay",))  # type: ignore[misc]


def test_a_log_without_propensities_serves_the_replay_only() -> None:
    steps = run(Exploring(1), 60, 1)
    for step in steps:
        step.fit.propensity = np.zeros_like(step.fit.propensity)
    with pytest.raises(ValueError, match="have no propensity above 0"):
        evaluate(lambda _: Fixed(SHALLOW), steps, step_ms, ("dr",))
    assert evaluate(lambda _: Fixed(SHALLOW), steps, step_ms, ("replay",))


def test_too_short_a_log_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is worth .* requests under this policy"):
        on(run(Fixed(SHALLOW), 5, 1), SHALLOW)
    with pytest.raises(ValueError, match="the log is empty"):
        on([], SHALLOW)


def test_a_sampled_log_is_refused() -> None:
    steps = run(Fixed(SHALLOW), 5, 1)
    steps[2].rows_in_step += 1
    with pytest.raises(ValueError, match="log with sample_rate 1"):
        on(steps, SHALLOW)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown estimator 'dm'; choose one of snips, dr, replay"):
        evaluate(lambda _: Fixed(SHALLOW), log(1, 100), step_ms, ("dm",))
