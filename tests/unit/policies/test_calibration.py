"""Confidences become acceptance, and a draft that they stop leaves the hazards unbiased."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from parlay.policies.acceptance import Acceptance
from parlay.policies.calibration import CALIBRATED, Calibration, calibrated, log_odds
from parlay.policies.goodput import Goodput, GoodputSettings
from parlay.policies.policy import EngineLimits, make_policy
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    Array,
    BatchView,
    PlanSource,
    StepOutcome,
    StopKind,
    no_shadows,
)

SLOPE, OFFSET = 1.4, 0.6
ROWS, K = 16, 4


def outcome_of(
    rng: np.random.Generator,
    step: int,
    threshold: float,
    proposer: Array | int = DRAFT_MODEL,
    offset: Array | float = OFFSET,
) -> tuple[StepOutcome, Array]:
    """Draft K tokens a row, confidences uniform, stopping where the estimated reach falls below
    threshold; return the outcome and the true P(reject) of the place that stopped it, nan none.

    proposer and offset: of all rows, or [rows].
    """
    confidence = rng.uniform(0.05, 0.95, (ROWS, K)).astype(np.float32)
    chance = calibrated(confidence, SLOPE, np.broadcast_to(offset, ROWS)[:, None])
    go = np.cumprod(chance, axis=1) >= threshold
    drafted = np.where(go.all(1), K, (~go).argmax(1))
    held = np.cumprod(rng.random((ROWS, K)) < chance, axis=1).sum(1)
    seen = np.arange(K) <= drafted[:, None]
    doubt = np.full(ROWS, np.nan)
    short = np.flatnonzero(drafted < K)
    doubt[short] = 1.0 - chance[short, drafted[short]]
    accepted = np.minimum(held, drafted)
    outcome = StepOutcome(
        request_id=np.arange(ROWS, dtype=np.uint64),
        task=np.zeros(ROWS, np.uint32),
        proposer=np.broadcast_to(proposer, ROWS).astype(np.uint8),
        requested_k=np.full(ROWS, K, np.int16),
        drafted_k=drafted.astype(np.int16),
        verified_k=drafted.astype(np.int16),
        accepted=accepted.astype(np.int16),
        emitted=(accepted + 1).astype(np.int16),
        match_tokens=np.zeros(ROWS, np.int32),
        truncated_by=np.zeros(ROWS, np.uint8),
        plan_source=np.full(ROWS, int(PlanSource.LOCAL), np.uint8),
        plan_step_id=np.full(ROWS, step, np.uint64),
        confidences=np.where(seen, confidence, np.nan).astype(np.float32),
        shadow=no_shadows(),
        step_id=step,
        padded_tokens=ROWS + int(drafted.sum()),
        verify_ms=10.0 + 0.5 * float(drafted.sum()),
        step_ms=12.0 + 0.5 * float(drafted.sum()),
        draft_depth=K,
    )
    return outcome, doubt


@pytest.mark.parametrize("proposer", CALIBRATED)
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_slope_and_offset_are_found_whether_or_not_drafts_are_stopped(
    threshold: float, proposer: int
) -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    for step in range(300):
        calibration.observe(outcome_of(rng, step, threshold, proposer)[0])
    slope, offset = calibration.coefficients()[proposer]
    grid = np.linspace(0.05, 0.95, 19)
    error = np.abs(calibrated(grid, slope, offset) - calibrated(grid, SLOPE, OFFSET))
    assert error.max() < 0.08
    others = np.delete(calibration.coefficients(), proposer, axis=0)
    assert np.all(others == [1.0, 0.0])
    assert calibration.trusts(np.array([proposer, NGRAM]))
    assert not calibration.trusts(np.array(CALIBRATED)), "the other one was never seen"
    assert not calibration.trusts(np.array([NGRAM])), "it has no confidences to stop at"


MIXED = np.where(np.arange(ROWS) % 2 == 0, DRAFT_MODEL, MEDUSA)


def mixed() -> Calibration:
    """Return what steps teach in which heads are surer than they should be."""
    rng, calibration = np.random.default_rng(4), Calibration()
    for step in range(300):
        offset = np.where(MIXED == MEDUSA, -1.5, OFFSET)
        calibration.observe(outcome_of(rng, step, 0.0, MIXED, offset)[0])
    return calibration


def test_each_proposer_has_a_line_of_its_own() -> None:
    found, grid = mixed().coefficients(), np.linspace(0.05, 0.95, 19)
    for proposer, offset in ((DRAFT_MODEL, OFFSET), (MEDUSA, -1.5)):
        error = calibrated(grid, *found[proposer]) - calibrated(grid, SLOPE, offset)
        assert np.abs(error).max() < 0.08


def test_a_state_goes_on_as_if_nothing_had_happened() -> None:
    calibration, again = mixed(), Calibration()
    again.load(calibration.state())
    for step in range(5):
        outcome, _ = outcome_of(np.random.default_rng(step), step, 0.0, MIXED)
        calibration.observe(outcome)
        again.observe(outcome)
    for name, array in calibration.state().items():
        assert np.array_equal(array, again.state()[name])
    assert again.coefficients().tolist() == calibration.coefficients().tolist()


@pytest.mark.parametrize("proposer", [*CALIBRATED, NGRAM])
def test_a_row_alone_teaches_what_it_teaches_among_others(proposer: int) -> None:
    rng, alone, among = np.random.default_rng(1), Calibration(), Calibration()
    arrays = [
        f.name for f in dataclasses.fields(StepOutcome) if f.name not in ("shadow", "draft_ms")
    ]
    for step in range(900):
        outcome = outcome_of(rng, step, 0.3, proposer)[0]
        outcome.confidences[0, 2] = (np.nan, 1.0, 0.5)[step % 3]

        def rows(outcome: StepOutcome, some: slice) -> StepOutcome:
            values = {name: getattr(outcome, name) for name in arrays}
            cut: dict[str, Any] = {
                name: v[some] for name, v in values.items() if isinstance(v, np.ndarray)
            }
            return dataclasses.replace(outcome, **cut)

        alone.observe(rows(outcome, slice(1)))
        idle = rows(outcome, slice(2))
        idle.verified_k[1] = 0
        among.observe(idle)
    assert (alone.coefficients() != [1.0, 0.0]).any() == (proposer != NGRAM)
    for name, array in alone.state().items():
        assert array == pytest.approx(among.state()[name], rel=1e-4, abs=1e-6), name


def test_a_state_of_the_draft_model_alone_is_taken() -> None:
    """As it was kept before heads had a line."""
    calibration, again = mixed(), mixed()
    again.load({name: array[0] for name, array in calibration.state().items()})
    found = again.coefficients()
    assert found[DRAFT_MODEL].tolist() == calibration.coefficients()[DRAFT_MODEL].tolist()
    assert found[MEDUSA].tolist() == [1.0, 0.0]
    assert again.trusts(np.array([DRAFT_MODEL]))
    assert not again.trusts(np.array([MEDUSA]))


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = mixed().state()
    with pytest.raises(ValueError, match="incomplete"):
        Calibration().load({name: array for name, array in state.items() if name != "held"})
    three = {name: np.concatenate([array, array[:1]]) for name, array in state.items()}
    for unlike in (three, state | {"odds": state["odds"][:, :-1]}, state | {"fit": np.zeros(3)}):
        with pytest.raises(ValueError, match="another version"):
            Calibration().load(unlike)


def mean_survival(acceptance: Acceptance, proposer: int) -> Array:
    rows = acceptance.rows_of(np.arange(ROWS, dtype=np.uint64), np.zeros(ROWS, np.uint32))
    survival = acceptance.survival(acceptance.frailty(rows), np.zeros(ROWS))
    mean: Array = survival[:, proposer].mean(0)
    return mean


def test_stopped_drafts_leave_the_hazards_as_they_are_without_stopping() -> None:
    def hazards(threshold: float, told: bool) -> Array:
        rng, acceptance = np.random.default_rng(2), Acceptance(K)
        for step in range(400):
            outcome, doubt = outcome_of(rng, step, threshold)
            acceptance.observe(outcome, doubt if told else None)
        return mean_survival(acceptance, DRAFT_MODEL)

    plain, stopped, naive = hazards(0.0, False), hazards(0.45, True), hazards(0.45, False)
    assert stopped[:2] == pytest.approx(plain[:2], abs=0.05)
    assert naive[0] > plain[0] + 0.1, "ignoring why a draft was stopped must show"


@pytest.mark.parametrize("proposer", CALIBRATED)
def test_goodput_knows_why_drafts_were_stopped(proposer: int) -> None:
    def survival(threshold: float) -> Array:
        rng, policy = np.random.default_rng(2), Goodput(GoodputSettings(K), EngineLimits())
        for step in range(400):
            policy.observe(outcome_of(rng, step, threshold, proposer)[0])
        return mean_survival(policy.acceptance, proposer)

    assert survival(0.45)[:2] == pytest.approx(survival(0.0)[:2], abs=0.05)


def test_nan_stays_nan_and_certainty_stays_finite() -> None:
    assert np.isnan(calibrated(np.array([np.nan]), 1.0, 0.0)).all()
    assert np.isfinite(log_odds(np.array([0.0, 1.0]))).all()


def batch_view(mask: int = 0b0101) -> BatchView:
    return BatchView(
        request_id=np.arange(ROWS, dtype=np.uint64),
        task=np.zeros(ROWS, np.uint32),
        context_tokens=np.full(ROWS, 100, np.int32),
        output_tokens=np.full(ROWS, 50, np.int32),
        prefill_tokens=np.zeros(ROWS, np.int32),
        temperature=np.zeros(ROWS, np.float32),
        max_k=np.full(ROWS, K, np.int32),
        proposer_mask=np.full(ROWS, mask, np.uint8),
        tpot_target_ms=np.full(ROWS, np.nan, np.float32),
        recent_accept=np.ones(ROWS, np.float32),
        match_tokens=np.zeros(ROWS, np.int32),
        draft_kv_lag=np.ones(ROWS, np.int32),
        seeded=np.zeros(ROWS, bool),
        running=ROWS,
        kv_tokens=1600,
    )


@pytest.mark.parametrize("proposer", CALIBRATED)
def test_goodput_stops_drafts_where_a_token_is_worth_less_than_it_costs(proposer: int) -> None:
    mask = 1 | 1 << proposer
    limits = EngineLimits(mask, K)
    policy, rng = make_policy("goodput", {}, limits), np.random.default_rng(3)
    view = batch_view(mask)
    assert policy.decide(view).stop_rule.kind is StopKind.NONE, "nothing is known yet"
    for step in range(60):
        view.step_id = step
        plan = policy.decide(view)
        policy.observe(outcome_of(rng, step, 0.0, proposer)[0])
    assert (plan.proposer == proposer).any()
    assert plan.stop_rule.kind is StopKind.SURVIVAL
    assert 0.0 < plan.stop_rule.threshold < 1.0
    threshold = plan.marginal_token_price_ms / plan.token_value_ms
    assert plan.stop_rule.threshold == pytest.approx(threshold)
    assert plan.calibration is not None
    assert plan.calibration[proposer].tolist() != [1.0, 0.0]
    again = make_policy("goodput", {}, limits)
    again.load(policy.state())
    assert again.decide(view).stop_rule == policy.decide(view).stop_rule
    padded = dataclasses.replace(view, bucket_edges=np.asarray([8, 16, 32, 64, 128], np.int32))
    plan = policy.decide(padded)
    assert (plan.proposer == proposer).any()
    assert plan.stop_rule.kind is StopKind.NONE


def test_prompts_beside_it_make_no_request_draft_deeper() -> None:
    limits = EngineLimits(0b0101, K, (), 4096)
    policy, rng, view = make_policy("goodput", {}, limits), np.random.default_rng(5), batch_view()
    for step in range(80):
        view.step_id = step
        plan = policy.decide(view)
        policy.observe(outcome_of(rng, step, 0.0)[0])
    assert plan.k.sum() > 0
    rows: dict[str, Any] = {
        f.name: value[2:]
        for f in dataclasses.fields(view)
        if isinstance(value := getattr(view, f.name), np.ndarray) and len(value) == ROWS
    }
    alone = policy.decide(dataclasses.replace(view, **rows)).k
    view.prefill_tokens[:2] = 256
    beside = policy.decide(view).k
    assert np.all(beside[:2] == 0)
    assert np.all(beside[2:] <= alone)
