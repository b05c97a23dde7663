"""What replicas add up: aged as one, faded when silent, never twice; and what a new one takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.policies.acceptance import CHANNELS, HALF_LIFE_ROWS, Acceptance
from parlay.policies.counts import Counts
from parlay.policies.policy import Policy, make_policy
from parlay.policies.shared_stats import (
    FADE_S,
    GONE_S,
    STALE_S,
    STAND_IN_FADE_S,
    Pool,
    Slot,
    acceptance_of,
    aged_beside,
    known_state,
    pooled,
    saved_of,
    warm,
)
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import DRAFT_MODEL, PROPOSERS, Array

K = LIMITS.k_max


def learned(policy: Policy, steps: int, seed: int = 1) -> Policy:
    """Let a policy watch steps that draft at random."""
    history = History(16, seed)
    fixed = make_policy("fixed", {"k": "8", "proposer": "draft_model"}, LIMITS)
    for _ in range(steps):
        rng = np.random.default_rng((seed, history.step_id))
        plan = fixed.decide(history.view())
        plan.k[:] = rng.integers(0, 9, len(plan))
        plan.proposer[:] = np.where(plan.k > 0, rng.integers(1, 3, len(plan)), 0)
        policy.observe(history.step(plan))
    return policy


def goodput(steps: int = 0, seed: int = 1) -> tuple[Policy, Acceptance]:
    policy = learned(make_policy("goodput", {}, LIMITS), steps, seed)
    acceptance = acceptance_of(policy)
    assert acceptance is not None
    return policy, acceptance


def counts_of(steps: int, seed: int = 1) -> Counts:
    return goodput(steps, seed)[1].counted()


def equal(one: Counts, two: Counts) -> bool:
    return all(np.array_equal(one.arrays()[n], two.arrays()[n]) for n in one.arrays())


# --- Ageing --------------------------------------------------------------------------------------


@given(st.integers(0, 4000), st.integers(0, 4000), st.floats(0.0, 500.0), st.floats(50.0, 2000.0))
def test_rows_in_turn_leave_what_one_replica_would_hold(
    own: int, other: int, before: float, half_life: float
) -> None:
    # Rows of weight 1 at an even pace: the sum over both is what one that saw all holds.
    def run(start: float, rows: int) -> float:
        kept = 0.5 ** (1.0 / half_life)
        return float(start * kept**rows + (1.0 - kept**rows) / (1.0 - kept))

    mine_rows, their_rows = np.array(float(own)), np.array(float(other))
    mine = aged_beside(
        np.array(run(before, own)), np.array(before), mine_rows, their_rows, half_life
    )
    theirs = aged_beside(np.array(run(0.0, other)), np.array(0.0), their_rows, mine_rows, half_life)
    assert float(mine + theirs) == pytest.approx(run(before, own + other), rel=1e-9)
    assert mine >= 0.0


def test_nobody_else_leaves_own_sums_as_they_are() -> None:
    now, before = np.array([7.0, 3.0]), np.array([5.0, 3.0])
    same = aged_beside(now, before, np.array([10.0, 0.0]), np.zeros(2), 600.0)
    # 5 has aged over ten rows to less than 5: the rest of 7 is new.
    np.testing.assert_allclose(same, now)


def test_counts_add_up_by_task_and_weight() -> None:
    one, two = counts_of(8, 1), counts_of(8, 2)
    half, full = np.full(PROPOSERS, 0.5), np.ones(PROPOSERS)
    total = pooled([(one, full, full), (two, half, half)], one)
    np.testing.assert_allclose(total.places, one.places + 0.5 * two.places)
    assert set(total.task_id) == set(one.task_id) | set(two.task_id)
    for task in total.task_id.tolist():
        wanted = np.zeros((2, PROPOSERS))
        for counts, weight in ((one, 1.0), (two, 0.5)):
            wanted += weight * counts.task_counts[:, counts.task_id == task].sum(axis=1)
        found = total.task_counts[:, total.task_id == task].sum(axis=1)
        np.testing.assert_allclose(found, wanted)


# --- A pool --------------------------------------------------------------------------------------


def test_what_others_counted_moves_decisions_but_is_not_passed_on() -> None:
    _, acceptance = goodput(4, 1)
    pool, own, hazard = Pool(acceptance), acceptance.counted(), acceptance.hazard.copy()
    other = counts_of(40, 2)
    for _ in range(3):
        told = pool.exchange({"b": Slot(other, 0.0)}, 0.0)
        assert equal(told, own)
        np.testing.assert_allclose(acceptance.others, other.places)
    assert np.abs(acceptance.hazard / hazard - 1.0).max() > 0.1
    both = Acceptance(K)
    both.join(both.counted(), pooled([(own, *ones()), (other, *ones())], own))
    np.testing.assert_allclose(acceptance.hazard, both.hazard)
    policy, _ = goodput(4, 1)
    np.testing.assert_array_equal(policy.state()["acceptance.rejected"], own.places[0])


def ones() -> tuple[Array, Array]:
    return np.ones(PROPOSERS), np.ones(PROPOSERS)


def test_tasks_of_others_are_known_here() -> None:
    _, acceptance = goodput()
    hard = replace(
        Counts.none(CHANNELS, K),
        task_id=np.array([9], np.uint32),
        task_counts=np.full((2, 1, PROPOSERS), 10.0) * np.array([3.0, 1.0])[:, None, None],
        task_rows=np.full((1, PROPOSERS), 30.0),
    )
    Pool(acceptance).exchange({"b": Slot(hard, 0.0)}, 0.0)
    rows = acceptance.rows_of(np.array([1, 2], np.uint64), np.array([9, 8], np.uint32))
    frailty = acceptance.frailty(rows)[:, DRAFT_MODEL]
    assert frailty[0] == pytest.approx((6.0 + 30.0) / (6.0 + 10.0))
    assert frailty[1] == 1.0


def test_own_counts_age_by_the_rows_of_others_that_are_new() -> None:
    _, acceptance = goodput(10, 1)
    pool, before = Pool(acceptance), acceptance.counted()
    other = counts_of(10, 2)
    first = pool.exchange({"b": Slot(other, 0.0)}, 0.0)
    assert equal(first, before)
    more = np.full(PROPOSERS, HALF_LIFE_ROWS)
    later = replace(other, rows=other.rows + more)
    told = pool.exchange({"b": Slot(later, 0.1)}, 0.1)
    np.testing.assert_allclose(told.places, 0.5 * before.places)
    again = pool.exchange({"b": Slot(later, 0.2)}, 0.2)
    assert equal(again, told)
    restarted = replace(other, rows=more)
    np.testing.assert_allclose(
        pool.exchange({"b": Slot(restarted, 0.3)}, 0.3).places, 0.25 * before.places
    )


def test_rows_of_an_outage_count_as_seen_in_turn() -> None:
    _, mine = goodput(10, 1)
    pool = Pool(mine)
    other = counts_of(10, 2)
    pool.exchange({"b": Slot(other, 0.0)}, 0.0)
    learner, _ = goodput()
    learner.acceptance = mine  # type: ignore[attr-defined]
    learned(learner, 200, 3)
    rows, held = mine.rows.copy(), mine.exposed.sum()
    for now_s in (0.5, 1.0, 1.5):
        pool.exchange(None, now_s)
    assert mine.exposed.sum() == pytest.approx(held)
    back = replace(other, rows=other.rows + rows)
    pool.exchange({"b": Slot(back, 2.0)}, 2.0)
    # As many rows there as here, 1,400 of each proposer: what one would hold of so many is .8 of a
    # full memory, of both .96, and half of that is left to each.
    assert mine.exposed.sum() / held == pytest.approx(0.5 * 0.96 / 0.8, abs=0.06)


def test_a_silent_replica_fades_by_rows_and_time_and_is_gone() -> None:
    policy, acceptance = goodput()
    pool, other = Pool(acceptance), counts_of(20, 2)
    slots = {"b": Slot(other, 0.0)}
    whole = float(other.places[1].sum())

    def held() -> float:
        return float(acceptance.others[1].sum()) / whole

    pool.exchange(slots, STALE_S)
    assert held() == pytest.approx(1.0)
    pool.exchange(slots, STALE_S + FADE_S)
    assert held() == pytest.approx(0.5)
    pool.exchange(None, STALE_S + 2 * FADE_S)
    assert held() == pytest.approx(0.25)
    learned(policy, 120, 3)
    pool.exchange(None, STALE_S + 2 * FADE_S)
    faded = held()
    assert faded < 0.25 * 0.5
    pool.exchange(slots, STALE_S + 2 * FADE_S)
    assert held() == pytest.approx(faded)
    pool.exchange({"b": Slot(other, 40.0)}, 40.0)
    assert held() == pytest.approx(1.0)
    pool.exchange(None, 41.0 + GONE_S)
    assert held() == 0.0


def test_a_slot_that_vanished_is_kept_until_it_is_old() -> None:
    _, acceptance = goodput()
    pool, other = Pool(acceptance), counts_of(20, 2)
    pool.exchange({"b": Slot(other, 0.0)}, 0.0)
    pool.exchange({}, 1.0)
    np.testing.assert_allclose(acceptance.others, other.places)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("places", np.zeros((2, CHANNELS, K + 1))),
        ("places", np.full((2, CHANNELS, K), np.nan)),
        ("rows", np.full(PROPOSERS, -1.0)),
        ("task_id", np.array([1, 1, 2], np.uint32)),
        ("task_rows", np.full((1, PROPOSERS), np.inf)),
    ],
)
def test_counts_of_another_shape_or_no_numbers_are_refused(name: str, value: Array) -> None:
    arrays = counts_of(8).arrays()
    assert equal(Counts.of_arrays(arrays, CHANNELS, K), counts_of(8))
    with pytest.raises(ValueError, match="counts"):
        Counts.of_arrays(arrays | {name: value}, CHANNELS, K)
    del arrays[name]
    with pytest.raises(ValueError, match=f"lack {name}"):
        Counts.of_arrays(arrays, CHANNELS, K)


# --- A new replica -------------------------------------------------------------------------------


def test_what_can_be_merged() -> None:
    for name, found in {"goodput": True, "pilot": True, "none": False, "ucb_spec": False}.items():
        assert (acceptance_of(make_policy(name, {}, LIMITS)) is not None) == found


@pytest.mark.parametrize("name", ["goodput", "pilot"])
@pytest.mark.parametrize("same", [True, False])
def test_a_new_replica_takes_what_is_not_of_requests(name: str, same: bool) -> None:
    old, new = (make_policy(name, {}, LIMITS) for _ in range(2))
    learned(old, 60)
    acceptance, fresh = acceptance_of(old), acceptance_of(new)
    assert acceptance is not None
    assert fresh is not None
    saved = saved_of(old, Pool(acceptance))
    pool = Pool(fresh)
    warm(new, pool, saved, 0.0, same)
    pool.exchange({}, 0.0)
    state, wanted = new.state(), old.state()
    for key in wanted:
        kept = {"cost", "calibration"} & set(key.split("."))
        own = key.split(".")[-1] in ("rejected", "exposed", "task_counts")
        if kept or (same and not own):
            np.testing.assert_array_equal(state[key], wanted[key], err_msg=key)
    assert not fresh.counted().places.any()
    np.testing.assert_allclose(fresh.hazard, acceptance.hazard)
    assert (len(fresh.state()["request_id"]) > 0) == same


def test_saved_counts_stand_in_for_what_others_do_not_tell() -> None:
    old, acceptance = goodput(60)
    saved, whole = saved_of(old, Pool(acceptance)), acceptance.counted()
    third = replace(whole, places=whole.places / 3.0)
    nothing = Counts.none(CHANNELS, K)
    # By what another one tells: a share of the saved counts is heard, the rest stands in.
    for other, age_s, share in (
        (None, 0.0, 1.0),
        (None, STAND_IN_FADE_S, 0.5),
        (nothing, 0.0, 1.0),
        (third, 0.0, 1.0),
        (whole, 0.0, 1.0),
        (replace(whole, places=3.0 * whole.places), 0.0, 3.0),
    ):
        new, fresh = goodput()
        pool = Pool(fresh)
        warm(new, pool, saved, age_s, False)
        told = pool.exchange({} if other is None else {"b": Slot(other, 1e6)}, 1e6)
        np.testing.assert_allclose(fresh.others, share * whole.places)
        assert not told.places.any()


def test_what_the_own_forerunner_told_is_kept_when_its_slot_ends() -> None:
    old, acceptance = goodput(60)
    saved, whole = saved_of(old, Pool(acceptance)), acceptance.counted()
    new, fresh = goodput()
    pool, slots = Pool(fresh), {"a@before": Slot(whole, -5.0)}
    warm(new, pool, saved, 5.0, True)
    for now_s in (0.0, 20.0, 40.0, GONE_S):
        pool.exchange(slots if now_s < 50.0 else {}, now_s)
        np.testing.assert_allclose(fresh.others, whole.places, rtol=1e-3)


def test_replicas_that_begin_with_one_file_do_not_pass_it_on() -> None:
    old, acceptance = goodput(60)
    made = []
    for _ in range(4):
        policy, fresh = goodput()
        policy.load(old.state())
        made.append((policy, fresh, Pool(fresh)))
    told = {f"r{n}": pool.exchange({}, 0.0) for n, (_, _, pool) in enumerate(made)}
    for number, (_, fresh, pool) in enumerate(made):
        others = {writer: Slot(c, 0.0) for writer, c in told.items() if writer != f"r{number}"}
        pool.exchange(others, 0.1)
        np.testing.assert_allclose(fresh.others[1] + fresh.exposed, acceptance.exposed)
        np.testing.assert_allclose(fresh.hazard, acceptance.hazard)
    # What one of them learns from now on is its own, also for a pool that begins later.
    policy, fresh, pool = made[0]
    learned(policy, 5, 3)
    assert pool.exchange({}, 0.2).places.any()
    assert Pool(fresh).exchange({}, 0.2).places.any()


def test_a_saved_state_holds_what_all_know() -> None:
    policy, acceptance = goodput(10, 1)
    pool, other = Pool(acceptance), counts_of(10, 2)
    pool.exchange({"b": Slot(other, 0.0)}, 0.0)
    saved = saved_of(policy, pool)
    np.testing.assert_allclose(saved["pooled.places"], acceptance.counted().places + other.places)
    np.testing.assert_array_equal(saved["acceptance.rejected"], acceptance.rejected)


@pytest.mark.parametrize("name", ["goodput", "pilot"])
def test_a_snapshot_by_hand_holds_what_others_counted(name: str) -> None:
    policy, new = learned(make_policy(name, {}, LIMITS), 5), make_policy(name, {}, LIMITS)
    acceptance, fresh = acceptance_of(policy), acceptance_of(new)
    assert acceptance is not None
    assert fresh is not None
    own = acceptance.counted()
    Pool(acceptance).exchange({"b": Slot(counts_of(30, 2), 0.0)}, 0.0)
    new.load(known_state(policy))
    np.testing.assert_allclose(fresh.hazard, acceptance.hazard)
    rows = acceptance.rows_of(np.arange(900, 904, dtype=np.uint64), np.arange(4, dtype=np.uint32))
    again = fresh.rows_of(np.arange(900, 904, dtype=np.uint64), np.arange(4, dtype=np.uint32))
    np.testing.assert_allclose(fresh.frailty(again), acceptance.frailty(rows))
    np.testing.assert_array_equal(acceptance.counted().places, own.places)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    policy, acceptance = goodput(10)
    pool, before = Pool(acceptance), {n: np.array(a) for n, a in policy.state().items()}
    other, others = goodput(20, 5)
    good = saved_of(other, Pool(others))
    for wrong in ({"pooled.places": np.zeros(3)}, {"cost.verify": np.zeros(3)}):
        with pytest.raises(ValueError, match=r"not fit|shape"):
            warm(policy, pool, good | wrong, 0.0, True)
        for key, array in policy.state().items():
            np.testing.assert_array_equal(array, before[key], err_msg=key)
    with pytest.raises(ValueError, match="lack"):
        warm(policy, pool, {}, 0.0, True)


def test_policies_without_counts_are_taken_whole() -> None:
    old, new = (make_policy("hedge_spec", {}, LIMITS) for _ in range(2))
    learned(old, 20)
    saved = saved_of(old, None)
    warm(new, None, saved, 3.0, False)
    for key, array in old.state().items():
        np.testing.assert_array_equal(new.state()[key], array)
    with pytest.raises(ValueError, match="not fit"):
        warm(make_policy("ucb_spec", {}, LIMITS), None, saved, 0.0, False)
