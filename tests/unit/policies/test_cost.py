"""The step-time model: what it learns, from how little, and that its prices can be used."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policies.synthetic import Machine

from parlay.policies.cost import KV_UNIT, TOKENS_UNIT, Line, StepTime, _median
from parlay.policies.cost_curve import EDGES, Curve
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    PROPOSERS,
    Array,
    StepOutcome,
    no_shadows,
)


def outcome_of(
    tokens: int,
    kv: int,
    verify_ms: float,
    draft: tuple[int, int, float] = (0, 0, 0.0),
    host_ms: float = 1.0,
    prefill: int = 0,
) -> StepOutcome:
    """Return a step of one row; draft is passes, tokens drafted, ms."""
    depth, drafted, draft_time = draft
    one = np.ones(1, np.int16)
    draft_ms = np.zeros(PROPOSERS)
    draft_ms[DRAFT_MODEL] = draft_time
    return StepOutcome(
        request_id=np.ones(1, np.uint64),
        task=np.zeros(1, np.uint32),
        proposer=np.full(1, DRAFT_MODEL if depth else NGRAM, np.uint8),
        requested_k=one * drafted,
        drafted_k=one * drafted,
        verified_k=one * drafted,
        accepted=one * 0,
        emitted=one,
        match_tokens=np.zeros(1, np.int32),
        truncated_by=np.zeros(1, np.uint8),
        plan_source=np.zeros(1, np.uint8),
        plan_step_id=np.zeros(1, np.uint64),
        confidences=np.full((1, 4), np.nan),
        shadow=no_shadows(),
        padded_tokens=tokens,
        prefill_tokens=prefill,
        kv_tokens=kv,
        draft_ms=draft_ms,
        draft_depth=depth,
        verify_ms=verify_ms,
        step_ms=verify_ms + draft_time + host_ms,
    )


def teach(model: StepTime, steps: int, seed: int = 0, spikes: float = 0.05) -> Machine:
    """Show `steps` steps of a noisy machine with token counts between 1 and 64."""
    machine, rng = Machine(), np.random.default_rng(seed)
    for _ in range(steps):
        tokens, kv = int(2 ** rng.uniform(0, 6)), int(rng.integers(100, 2000))
        jolt = rng.lognormal(0, 0.05) * (4.0 if rng.random() < spikes else 1.0)
        depth, drafted = int(rng.integers(1, 4)), int(rng.integers(1, 20))
        draft = machine.one_token_ms * (0.025 * depth + 0.0012 * drafted)
        verify = machine.verify_ms(tokens, kv) * jolt
        model.observe(outcome_of(tokens, kv, verify, (depth, drafted, draft * jolt)), 0.0)
    return machine


def relative_errors(model: StepTime, machine: Machine) -> Array:
    tokens = np.array([1, 2, 4, 8, 16, 32, 64])
    true = np.array([machine.verify_ms(int(t), 1000) for t in tokens])
    return model.verify_ms(tokens, 1000.0) / (true + 1.0) - 1.0


def test_a_noisy_machine_is_learned_within_tens_of_steps() -> None:
    for seed in range(5):
        model = StepTime()
        machine = teach(model, 40, seed)
        assert np.abs(relative_errors(model, machine)).max() < 0.15
        teach(model, 160, seed + 100)
        assert np.abs(relative_errors(model, machine)).max() < 0.08


def test_draft_passes_are_told_from_tokens() -> None:
    model = StepTime()
    machine = teach(model, 150)
    a_pass, token_ms, catch_up = model.draft_ms()
    assert a_pass == pytest.approx(0.025 * machine.one_token_ms, rel=0.25)
    assert token_ms[DRAFT_MODEL] == pytest.approx(0.0012 * machine.one_token_ms, rel=0.4)
    assert catch_up > 0
    assert token_ms[NGRAM] >= 0


def test_a_pass_of_the_heads_is_told_from_their_tokens() -> None:
    model, rng = StepTime(), np.random.default_rng(0)
    for _ in range(60):
        drafted = int(rng.integers(1, 5))
        step = outcome_of(1 + drafted, 100, 5.0, (0, drafted, 0.0))
        step.proposer[:] = MEDUSA
        step.draft_ms[MEDUSA] = 0.7 + 0.02 * drafted
        step.step_ms += float(step.draft_ms[MEDUSA])
        model.observe(step, 0.0)
    _, token_ms, _ = model.draft_ms()
    assert model.heads_ms() == pytest.approx(0.7, rel=0.1)
    assert model.heads_ms() + 4 * token_ms[MEDUSA] == pytest.approx(0.78, rel=0.05)
    assert model.markup() == pytest.approx(1.0, abs=0.02), "drafting took what it was said to"


def test_spikes_move_nothing_for_long() -> None:
    calm, spiky = StepTime(), StepTime()
    teach(calm, 100, spikes=0.0)
    teach(spiky, 100, spikes=0.1)
    tokens = np.array([1, 8, 32])
    assert spiky.verify_ms(tokens, 1000.0) == pytest.approx(calm.verify_ms(tokens, 1000.0), rel=0.1)


def test_a_spike_in_the_very_first_step_is_forgiven() -> None:
    model = StepTime()
    model.observe(outcome_of(1, 100, 35.0 * 8), 0.0)
    machine = teach(model, 20, spikes=0.0)
    assert np.abs(relative_errors(model, machine)).max() < 0.15


def test_a_knee_is_seen_where_the_line_has_none() -> None:
    model, rng = StepTime(), np.random.default_rng(0)
    for _ in range(300):
        tokens = int(rng.choice([8, 16, 32, 48, 64]))
        model.observe(outcome_of(tokens, 0, 10.0 if tokens <= 32 else 20.0), 0.0)
    eight, thirty_two, forty_eight = model.verify_ms(np.array([8, 32, 48]), 0.0) - 1.0
    assert thirty_two / eight < 1.35
    assert forty_eight / thirty_two > 1.4


def test_long_prompts_do_not_bend_the_line() -> None:
    plain, with_prompts = StepTime(), StepTime()
    teach(plain, 60)
    teach(with_prompts, 60)
    for _ in range(20):
        with_prompts.observe(outcome_of(400, 400, 900.0, prefill=390), 0.0)
    tokens = np.array([1, 16])
    assert np.array_equal(with_prompts.verify_ms(tokens, 500.0), plain.verify_ms(tokens, 500.0))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 600),
            st.integers(0, 10**6),
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(0, 1e6),
        ),
        max_size=40,
    )
)
def test_prices_are_finite_and_rise_whatever_was_seen(
    steps: list[tuple[int, int, float, float]],
) -> None:
    model = StepTime()
    for tokens, kv, verify, draft in steps:
        model.observe(outcome_of(tokens, kv, verify, (1, 2, draft)), 3.0)
    curve = model.verify_ms(np.arange(1, 200), 5000.0)
    assert np.isfinite(curve).all()
    assert (curve > 0).all()
    assert (np.diff(curve) >= 0).all()
    a_pass, token_ms, catch_up = model.draft_ms()
    prices = np.array([a_pass, catch_up, *token_ms])
    assert np.isfinite(prices).all()
    assert (prices >= 0).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 700), st.integers(0, 10**6))
def test_one_number_of_tokens_takes_what_the_curve_says(steps: int, tokens: int, kv: int) -> None:
    model = StepTime()
    teach(model, steps % 50)
    for count in (1, 7, 24, 511, 512, 513, 640)[: steps % 8]:
        model.observe(outcome_of(count, 100, 30.0 + count), 0.0)
    curve = model.verify_ms(np.array([float(tokens)]), float(kv))
    assert model.verify_one_ms(float(tokens), float(kv)) == pytest.approx(
        float(curve[0]), rel=1e-12
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_the_median_is_numpys(values: list[float]) -> None:
    assert _median(np.array(values)) == pytest.approx(float(np.median(values)), rel=1e-12)


def test_each_step_counts_for_the_edge_that_is_nearest_in_its_log() -> None:
    for tokens in range(1, 700):
        curve = Curve()
        curve.add(float(tokens), 0.0, 0.0, 10.0)
        nearest = np.abs(np.log(EDGES) - math.log(tokens)).argmin()
        assert np.flatnonzero(curve.seen).tolist() == [nearest], tokens


def cpu_ms(tokens: int) -> float:
    """Return what a pass took that is bound by memory up to 16 tokens and by arithmetic beyond."""
    return 7.0 + 0.34 * tokens if tokens <= 16 else 12.4 + 0.67 * (tokens - 16)


def test_a_knee_beyond_all_that_was_seen_is_found_in_five_steps() -> None:
    model, rng = StepTime(), np.random.default_rng(1)
    for _ in range(200):
        tokens = int(rng.integers(1, 17))
        model.observe(outcome_of(tokens, 1000, cpu_ms(tokens) * rng.lognormal(0, 0.03)), 0.0)
    assert model.verify_ms(np.array([56]), 1000.0)[0] < 0.75 * cpu_ms(56)  # nobody could know
    for tokens in (48, 60, 55, 58, 50):
        model.observe(outcome_of(tokens, 1000, cpu_ms(tokens) * rng.lognormal(0, 0.03)), 0.0)
    seen = np.array([13, 48, 56, 64])
    true = [cpu_ms(int(t)) + 1.0 for t in seen]
    assert model.verify_ms(seen, 1000.0) == pytest.approx(true, rel=0.1)


def test_a_machine_that_slows_down_for_good_is_followed_and_one_that_jolts_is_not() -> None:
    model = StepTime()
    for _ in range(200):
        model.observe(outcome_of(8, 1000, 10.0), 0.0)
    before = model.verify_ms(np.array([8]), 1000.0)[0]
    for _ in range(3):
        model.observe(outcome_of(8, 1000, 40.0), 0.0)
        model.observe(outcome_of(8, 1000, 10.0), 0.0)
    assert model.verify_ms(np.array([8]), 1000.0)[0] == pytest.approx(before, rel=0.1)
    for _ in range(16):
        model.observe(outcome_of(8, 1000, 20.0), 0.0)
    assert model.verify_ms(np.array([8]), 1000.0)[0] == pytest.approx(21.0, rel=0.1)


def test_a_line_is_the_ridge_solution_on_clean_data() -> None:
    line, rng = Line((1.0, 0.5, 0.2), (1.0, 1.0, 1.0)), np.random.default_rng(0)
    true = np.array([20.0, 15.0, 3.0])
    for _ in range(96):
        x = np.array([1.0, rng.uniform(0, 64) / TOKENS_UNIT, rng.uniform(0, 4096) / KV_UNIT])
        line.add(x, float(x @ true))
    assert line.count == 96
    assert line.weights() == pytest.approx(true, rel=0.03)


def test_state_goes_round() -> None:
    model, other = StepTime(), StepTime()
    teach(model, 50)
    other.load(model.state())
    teach(model, 10, seed=5)
    teach(other, 10, seed=5)
    tokens = np.arange(1, 100)
    assert np.array_equal(model.verify_ms(tokens, 100.0), other.verify_ms(tokens, 100.0))
    assert np.array_equal(model.draft_ms()[1], other.draft_ms()[1])
    with pytest.raises(ValueError, match="incomplete"):
        other.load({})
    with pytest.raises(ValueError, match="numbers"):
        other.load(model.state() | {"draft": np.zeros(2)})


def test_what_padding_costs_is_learned_and_kept_apart_from_tokens() -> None:
    rng = np.random.default_rng(3)
    padded, even = StepTime(), StepTime()
    for _ in range(200):
        k = rng.integers(0, 9, 8)
        tokens = 8 + int(k.sum())
        pads = 8 * int(k.max()) - int(k.sum())
        for model, pad_ms in ((padded, 0.4), (even, 0.0)):
            one = outcome_of(tokens, 1000, 20.0 + 0.7 * tokens + pad_ms * pads)
            one.verified_k, one.request_id = k.astype(np.int16), np.arange(8, dtype=np.uint64)
            model.observe(one, 0.0)
    assert padded.pad_ms() == pytest.approx(0.4, rel=0.35)
    assert even.pad_ms() < 0.1
    assert padded.verify_ms(np.array([40]), 1000.0)[0] == pytest.approx(48.0 + 1.0, rel=0.1)


def test_what_the_lines_miss_of_steps_with_drafts_is_marked_up_and_fades() -> None:
    model = StepTime()
    for n in range(240):
        drafts = n % 2
        host_ms = 4.0 if drafts else 1.0  # of one token count, so that no line can tell them apart
        model.observe(outcome_of(8, 500, 20.0, (0, 8 * drafts, 0.0), host_ms), 0.0)
    assert model.markup() == pytest.approx(24.0 / 21.0, rel=0.06)
    learned = model.markup()
    for _ in range(400):
        model.observe(outcome_of(8, 500, 20.0), 0.0)
    assert 1.0 < model.markup() < learned


def test_without_a_difference_nothing_is_marked_up() -> None:
    model = StepTime()
    teach(model, 300)
    assert model.markup() == pytest.approx(1.0, abs=0.05)


def test_times_that_fall_by_eleven_orders_of_magnitude_break_nothing() -> None:
    for seed in range(3):
        curve, rng = Curve(), np.random.default_rng(seed)
        for ms in np.geomspace(1e7, 1e-4, 120):
            curve.add(2048.0, float(rng.choice([0.0, 1e7 / KV_UNIT])), 0.0, float(ms))
        times = curve.ms(np.arange(1.0, 3000.0))
        assert np.isfinite(times).all()
        assert (times > 0.0).all()
        assert np.isfinite(curve.cov).all()
