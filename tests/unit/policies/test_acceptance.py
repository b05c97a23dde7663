"""Hazards from censored, selected data; frailties; state and exchange."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parlay.policies.acceptance import CHANNELS, Acceptance
from parlay.policies.acceptance_rows import Rows
from parlay.policies.evidence import Draft, Drafts, draft_of, drafts_of
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    NONE,
    PROPOSERS,
    Array,
    ShadowRows,
    StepOutcome,
    no_shadows,
)

DRAFT = CHANNELS - 2
HAZARD = np.array([0.39, 0.32, 0.27])


def outcome_of(
    ids: Array,
    proposer: Array,
    verified: Array,
    accepted: Array,
    match: int = 0,
    shadow: ShadowRows | None = None,
    task: int = 7,
) -> StepOutcome:
    rows = len(ids)
    return StepOutcome(
        request_id=np.asarray(ids, np.uint64),
        task=np.full(rows, task, np.uint32),
        proposer=np.asarray(proposer, np.uint8),
        requested_k=np.asarray(verified, np.int16),
        drafted_k=np.asarray(verified, np.int16),
        verified_k=np.asarray(verified, np.int16),
        accepted=np.asarray(accepted, np.int16),
        emitted=np.asarray(accepted, np.int16) + 1,
        match_tokens=np.full(rows, match, np.int32),
        truncated_by=np.zeros(rows, np.uint8),
        plan_source=np.zeros(rows, np.uint8),
        plan_step_id=np.zeros(rows, np.uint64),
        confidences=np.full((rows, 4), np.nan, np.float32),
        shadow=shadow or no_shadows(),
    )


@functools.cache
def simulate(choose_deep: str, steps: int = 900, k_max: int = 3) -> tuple[Array, Array, Array]:
    """Return (estimated survival, naive pooled hazards, those of a request new to its task).

    Requests differ by a gamma frailty. "history" verifies k = 1 until a request's own last drafts
    held, so that easy requests are seen deep; "always" verifies k_max.
    """
    rng = np.random.default_rng(11)
    rows = 32
    learner = Acceptance(k_max)
    at_risk, failed = np.zeros(k_max), np.zeros(k_max)
    ids = np.arange(1, rows + 1)
    level = rng.gamma(2.0, 0.5, rows)
    recent = np.full(rows, 0.5)
    total, count = np.zeros(k_max), 0
    for step in range(steps):
        if step % 20 == 19:
            renewed = rng.random(rows) < 0.5
            ids = np.where(renewed, ids + 1000, ids)
            level = np.where(renewed, rng.gamma(2.0, 0.5, rows), level)
            recent = np.where(renewed, 0.5, recent)
        reject = np.minimum(level[:, None] * HAZARD, 0.98)
        flips = rng.random((rows, k_max)) < reject
        could = np.where(flips.any(axis=1), flips.argmax(axis=1), k_max)
        k = np.full(rows, k_max)
        if choose_deep == "history":
            k = np.where(recent > 0.7, k_max, 1)
        accepted = np.minimum(could, k)
        recent = 0.8 * recent + 0.2 * (could > 0)
        place = np.arange(k_max)
        risk = place < np.minimum(accepted + 1, k)[:, None]
        at_risk += risk.sum(axis=0)
        failed += (risk & (place == accepted[:, None])).sum(axis=0)
        learner.observe(outcome_of(ids, np.full(rows, DRAFT_MODEL), k, accepted))
        rows_of = learner.rows_of(ids, np.full(rows, 7))
        if step > steps // 2:
            frailty = learner.frailty(rows_of)
            total += learner.survival(frailty, np.zeros(rows))[:, DRAFT_MODEL].mean(axis=0)
            count += 1
    new = learner.frailty(learner.rows_of(np.array([10**6]), np.array([7])))[0, DRAFT_MODEL]
    return total / count, failed / at_risk, new * learner.hazard[DRAFT]


def true_survival() -> Array:
    level = np.random.default_rng(0).gamma(2.0, 0.5, 200_000)
    reject = np.minimum(level[:, None] * HAZARD, 0.98)
    survival: Array = np.cumprod(1 - reject, axis=1).mean(axis=0)
    return survival


def test_adaptive_depth_teaches_what_full_depth_teaches() -> None:
    always, _, _ = simulate("always")
    adaptive, naive, _ = simulate("history")
    true = true_survival()
    assert always == pytest.approx(true, abs=0.035)
    assert adaptive == pytest.approx(true, abs=0.05)
    wrong = np.cumprod(1 - naive)
    # Deep places were seen on easy requests only: the pooled ratio believes in far too much.
    assert wrong[2] - true[2] > 2 * np.abs(adaptive - true)[2]


def test_pooled_hazards_are_not_too_low_at_depth() -> None:
    _, naive, pooled = simulate("history")
    _, _, full = simulate("always")
    assert np.abs(pooled - full)[1:].max() < 0.03
    assert (full - naive)[1:].min() > 0.1


def test_only_positions_at_risk_count() -> None:
    learner = Acceptance(4)
    ids = np.arange(1, 4)
    learner.rows_of(ids, np.full(3, 7), np.full(3, 50))
    proposer = np.array([DRAFT_MODEL, DRAFT_MODEL, NONE])
    learner.observe(outcome_of(ids, proposer, np.array([4, 2, 0]), np.array([1, 2, 0])))
    # Row 1 fails at place 2; row 2 is censored after 2; row 3 shows nothing.
    assert learner.rejected[DRAFT].tolist() == [0, 1, 0, 0]
    assert (learner.exposed[DRAFT] > 0).tolist() == [True, True, False, False]
    assert not learner.exposed[:DRAFT].any()


def test_shadow_rows_teach_their_match_bucket() -> None:
    learner = Acceptance(4)
    learner.rows_of(np.array([1, 2]), np.full(2, 7), np.full(2, 50))
    shadow = ShadowRows(
        request_id=np.array([1, 2, 99], np.uint64),
        proposer=np.full(3, NGRAM, np.uint8),
        offered_k=np.full(3, 4, np.int16),
        matched=np.array([2, 1, 0], np.float32),
        observed=np.array([3, 1, 1], np.int16),
        match_tokens=np.array([5, 5, 5], np.int32),
        kind=np.zeros(3, np.uint8),
    )
    none = np.zeros(2)
    shown = learner.observe(outcome_of(np.array([1, 2]), none, none, none, shadow=shadow))
    assert learner.rejected[4].tolist() == [0, 0, 1, 0]
    assert (learner.exposed[4] > 0).tolist() == [True, True, True, False]
    assert shown.tolist() == [False, True, False, False]


def test_a_request_that_fails_is_told_from_one_that_holds() -> None:
    learner = Acceptance(4)
    ids = np.array([1, 2])
    learner.rows_of(ids, np.full(2, 7), np.full(2, 50))
    for _ in range(15):
        learner.observe(outcome_of(ids, np.full(2, DRAFT_MODEL), np.full(2, 4), np.array([0, 4])))
    frailty = learner.frailty(learner.rows_of(ids, np.full(2, 7)))[:, DRAFT_MODEL]
    assert frailty[0] > 2 * frailty[1]
    survival = learner.survival(learner.frailty(learner.rows_of(ids, ids)), np.zeros(2))
    assert survival[0, DRAFT_MODEL, 0] < 0.4 < survival[1, DRAFT_MODEL, 0]


def test_a_task_that_fails_is_told_to_its_next_request() -> None:
    learner = Acceptance(4)
    for step in range(40):
        for task, accepted in ((7, 0), (8, 4)):
            ids = np.array([100 * task + step])
            learner.rows_of(ids, np.array([task]), np.array([50]))
            k = np.array([4])
            learner.observe(
                outcome_of(ids, np.array([DRAFT_MODEL]), k, np.array([accepted]), task=task)
            )
    rows = learner.rows_of(np.array([9001, 9002]), np.array([7, 8]))
    poor, good = learner.survival(learner.frailty(rows), np.zeros(2))[:, DRAFT_MODEL, 0]
    assert poor < 0.35 < 0.65 < good


def test_an_id_that_is_used_again_is_another_request() -> None:
    learner = Acceptance(4)
    ids, task = np.array([1]), np.array([7])
    learner.rows_of(ids, task, np.array([0]))
    for step in range(20):
        learner.rows_of(ids, task, np.array([step]))
        learner.observe(outcome_of(ids, np.array([DRAFT_MODEL]), np.array([4]), np.array([0])))
    same = learner.frailty(learner.rows_of(ids, task, np.array([20])))[0, DRAFT_MODEL]
    again = learner.frailty(learner.rows_of(ids, np.array([8]), np.array([0])))[0, DRAFT_MODEL]
    other = learner.frailty(learner.rows_of(np.array([2]), np.array([8])))[0, DRAFT_MODEL]
    assert same > 1.5
    assert again == other == 1.0


def test_a_cold_start_stays_optimistic() -> None:
    learner = Acceptance(4)
    ids = np.arange(1, 17)
    for _ in range(2):
        rows = np.full(16, DRAFT_MODEL)
        learner.observe(outcome_of(ids, rows, np.full(16, 4), np.zeros(16)))
    fresh = learner.rows_of(np.array([500]), np.array([0]))
    survival = learner.survival(learner.frailty(fresh), np.zeros(1))[0, DRAFT_MODEL]
    # A pass that costs a tenth of a step still pays, so drafting goes on and learns better.
    assert survival[0] > 0.3


def test_expected_length_in_hazards_is_one_plus_survivals() -> None:
    hazard = np.random.default_rng(1).random(5)
    survival = np.cumprod(1 - hazard)
    ends = np.append(hazard, 1.0) * np.append(1.0, survival)
    assert (np.arange(1, 7) * ends).sum() == pytest.approx(1 + survival.sum())


def test_state_goes_round_and_forgotten_requests_leave_no_trace() -> None:
    learner = Acceptance(4)
    rng = np.random.default_rng(3)
    for step in range(700):
        ids = np.arange(step // 10, step // 10 + 4)
        learner.observe(
            outcome_of(ids, np.full(4, DRAFT_MODEL), np.full(4, 4), rng.integers(0, 5, 4))
        )
    state = learner.state()
    assert len(state["request_id"]) < 70
    other = Acceptance(4)
    other.load(state)
    assert set(state) == set(other.state())
    for key, value in state.items():
        assert np.array_equal(value, other.state()[key]), key
    with pytest.raises(ValueError, match="k_max"):
        Acceptance(5).load(state)
    with pytest.raises(ValueError, match="lacks"):
        other.load({})


def test_merged_replicas_know_what_one_would() -> None:
    one, two, both = Acceptance(4), Acceptance(4), Acceptance(4)
    ids = np.array([1])
    for learner in (one, two, both):
        learner.rows_of(ids, np.array([7]), np.array([50]))
    event = outcome_of(ids, np.array([DRAFT_MODEL]), np.array([4]), np.array([2]))
    one.observe(event)
    both.observe(event)
    delta = one.delta(0)
    two.merge([delta])
    assert two.rejected == pytest.approx(both.rejected)
    assert two.exposed == pytest.approx(both.exposed)
    assert two.hazard == pytest.approx(both.hazard)
    since = int(delta["version"])
    assert not one.delta(since)["counts"].any()
    assert not two.delta(0)["counts"].any()
    with pytest.raises(ValueError, match="no delta"):
        one.delta(12345)
    with pytest.raises(ValueError, match="shape"):
        two.merge([{"counts": np.zeros(3)}])


def test_survival_falls_and_stays_within_its_bounds() -> None:
    learner = Acceptance(8)
    frailty = np.random.default_rng(0).gamma(1.0, 2.0, (20, PROPOSERS))
    survival = learner.survival(frailty, np.arange(20))
    assert (survival >= 0).all()
    assert (survival <= 1).all()
    assert (np.diff(survival, axis=2) <= 0).all()
    assert not survival[:, NONE].any()
    assert not survival[0, NGRAM].any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([NGRAM, DRAFT_MODEL, MEDUSA]),
            st.integers(1, 6),
            st.integers(0, 6),
            st.integers(0, 12),
            st.floats(0.1, 1.0),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 4),
)
def test_one_draft_counts_for_what_it_counts_among_others(
    drafts: list[tuple[int, int, int, int, float]], output_tokens: int
) -> None:
    alone, among = Acceptance(4), Acceptance(4)
    for learner in (alone, among):
        ids, tasks = np.array([1, 2]), np.array([7, 8])
        learner.rows_of(ids, tasks, np.full(2, output_tokens))
        for proposer, seen, accepted, match, share in drafts:
            row = learner.rows_of(ids, tasks)[seen % 2]
            one = Draft(int(row), proposer, match, min(accepted, seen), seen, share)
            if learner is alone:
                learner._count_one(one)
            else:
                learner._count_all(
                    Drafts(*(np.array([value]) for value in dataclasses.astuple(one)))
                )
    assert alone.delta(0)["counts"] == pytest.approx(among.delta(0)["counts"], rel=1e-12)
    state = among.state()
    for name, value in alone.state().items():
        assert value == pytest.approx(state[name], rel=1e-12), name
    ours, theirs = alone.counted().arrays(), among.counted().arrays()
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-12), name


@pytest.mark.parametrize("doubt", [None, np.nan, 0.3])
@pytest.mark.parametrize(
    ("proposer", "verified", "accepted"), [(NONE, 0, 0), (NGRAM, 3, 1), (DRAFT_MODEL, 2, 2)]
)
@pytest.mark.parametrize("row", [-1, 4])
def test_a_step_of_one_row_shows_what_it_shows_among_others(
    row: int, proposer: int, verified: int, accepted: int, doubt: float | None
) -> None:
    drafted, k, held = (np.array([v]) for v in (proposer, verified, accepted))
    outcome = outcome_of(np.array([1]), drafted, k, held, 5)
    doubts = None if doubt is None else np.array([doubt])
    many = drafts_of(outcome, np.array([row]), np.zeros(0, np.intp), doubts)
    one = draft_of(outcome, row, doubts)
    shown = [getattr(many, field.name).tolist() for field in dataclasses.fields(many)]
    assert shown == [
        [] if one is None else [v] for v in dataclasses.astuple(one or Draft(*[0] * 6))
    ]


def test_rows_are_the_same_whoever_came_left_or_moved_in_between() -> None:
    rng, table, known = np.random.default_rng(5), Rows(), dict[int, int]()
    ids = np.arange(1, 9, dtype=np.uint64)
    for _ in range(60):
        kind = rng.integers(0, 4)
        if kind == 0:
            ids = rng.permutation(ids)
        elif kind == 1:
            ids[rng.integers(0, len(ids))] = ids.max() + np.uint64(1)
        elif kind == 2 and len(ids) > 4:
            ids = np.delete(ids, 0)
        else:
            ids = np.append(ids, ids.max() + np.uint64(1))
        asked = ids.copy()
        rows = table.of(asked, np.zeros(len(ids), np.uint32), np.ones(len(ids), np.int32)).tolist()
        asked[:] = 0  # whoever asks may use the array again
        for request, row in zip(ids.tolist(), rows, strict=True):
            assert known.setdefault(request, row) == row
        assert len(set(rows)) == len(rows)


def test_an_engine_without_medusa_is_told_nothing_of_it() -> None:
    frailty, match = np.ones((3, PROPOSERS)), np.array([0, 2, 9])
    every, none = (Acceptance(6, heads).survival(frailty, match) for heads in (True, False))
    assert every[:, MEDUSA].all()
    assert not none[:, MEDUSA].any()
    np.testing.assert_array_equal(every[:, :MEDUSA], none[:, :MEDUSA])
    loaded = Acceptance(6, False)
    loaded.load(Acceptance(6).state())
    assert not loaded.survival(frailty, match)[:, MEDUSA].any()


def test_some_steps_told_at_once_teach_what_they_do_one_by_one() -> None:
    rng = np.random.default_rng(3)
    single, together = Acceptance(4), Acceptance(4)
    ids = np.arange(6)
    for _ in range(60):
        told: list[tuple[StepOutcome, Array | None]] = []
        for _ in range(8):
            k = rng.integers(0, 5, 6)
            held = np.minimum(rng.geometric(0.4, 6) - 1, k)
            told.append((outcome_of(ids, np.where(k > 0, NGRAM, 0), k, held, 5), None))
        one_by_one = [single.observe(outcome).tolist() for outcome, _ in told]
        assert [shown.tolist() for shown in together.observe_all(told)] == one_by_one
    assert single.version == together.version == 480
    assert together.rows.tolist() == single.rows.tolist()
    np.testing.assert_allclose(together.exposed, single.exposed, rtol=0.05)
    np.testing.assert_allclose(together.match_hazard()[4], single.match_hazard()[4], rtol=0.05)
    at = [own.rows_of(ids, np.full(6, 7)) for own in (single, together)]
    frailties = [
        own.frailty(rows)[:, NGRAM] for own, rows in zip((single, together), at, strict=True)
    ]
    np.testing.assert_allclose(frailties[1], frailties[0], rtol=0.1)


def test_told_at_once_or_alone_a_single_step_teaches_the_same() -> None:
    single, together = Acceptance(4), Acceptance(4)
    outcome = outcome_of(np.arange(3), np.full(3, NGRAM), np.full(3, 4), np.array([0, 2, 4]), 5)
    for _ in range(5):
        single.observe(outcome)
        together.observe_all([(outcome, None)])
    for name, array in single.state().items():
        np.testing.assert_allclose(together.state()[name], array, err_msg=name)


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("match_tokens", [0, 1, 5, 40])
def test_a_batch_of_one_is_foretold_what_it_is_among_others(heads: bool, match_tokens: int) -> None:
    learner, rng = Acceptance(6, heads), np.random.default_rng(match_tokens)
    ids = np.arange(1, 4)
    for _ in range(50):
        k = rng.integers(1, 6, 3)
        learner.observe(outcome_of(ids, rng.integers(1, 4, 3), k, rng.integers(0, k + 1), 5))
    both = learner.rows_of(ids[:2], np.full(2, 7))
    match = np.full(2, match_tokens)
    among, alone = learner.frailty(both), learner.frailty(both[:1])
    np.testing.assert_array_equal(alone, among[:1])
    survival = learner.survival(among, match)
    np.testing.assert_array_equal(learner.survival(alone, match[:1]), survival[:1])
