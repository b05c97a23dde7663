"""The roofline: it meets the measured tables, scales as it must, and refuses what is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.policies.types import DRAFT_MODEL
from parlay.sim import roofline as roofs
from parlay.sim.costs import StepTime, Work, load_costs
from parlay.sim.roofline import (
    GPUS,
    MODELS,
    all_reduce_ms,
    distinct_experts,
    fit,
    moved_ms,
    roofline,
)

H200, H100 = "roofline:h200/llama-3.1-8b", "roofline:h100/llama-3.1-8b"
H100_GPU = GPUS["h100"]


def verify_ms(name: str, batch: int, k: int = 0, context: int = 1024) -> float:
    return load_costs(name).time(Work(batch * (k + 1), batch, batch * context)).verify_ms


def moved(tokens: int, gpu: str = "h200") -> float:
    edges = [edge for edge in roofs.GRAPH_EDGES if edge >= tokens]
    return moved_ms(GPUS[gpu], MODELS["llama-3.1-8b"], 1, edges[0] if edges else tokens)


@pytest.mark.parametrize("batch", [1, 8, 32, 64, 128, 256])
@pytest.mark.parametrize("k", [0, 3, 7])
def test_it_is_near_the_measured_step_of_the_gpu_it_was_fitted_on(batch: int, k: int) -> None:
    # The tables hold matrices and attention only.
    ours = verify_ms(H200, batch, k) - moved(batch * (k + 1))
    assert ours == pytest.approx(verify_ms("h200_8b", batch, k), rel=0.12)


@pytest.mark.parametrize("tokens", [1, 16, 64, 128, 512, 2048])
@pytest.mark.parametrize(
    ("roof", "measured"),
    [("roofline:a100/llama-3.1-8b", "vidur_a100_llama3_8b"),
     ("roofline:h100/llama-2-7b", "vidur_h100_llama2_7b")],
)  # fmt: skip
def test_it_is_near_what_was_measured_on_gpus_it_was_not_fitted_on(
    roof: str, measured: str, tokens: int
) -> None:
    ours, theirs = (load_costs(n).time(Work(tokens, 1, 1)).verify_ms for n in (roof, measured))
    assert ours == pytest.approx(theirs, rel=0.3)


def test_a_small_step_goes_with_memory_and_a_large_one_with_arithmetic() -> None:
    small = verify_ms(H100, 1, context=0) / verify_ms(H200, 1, context=0)
    assert small == pytest.approx(4.8 / 3.35, rel=0.05)
    first, second = (
        load_costs(f"roofline:{gpu}/llama-3.1-8b").time(Work(16384, 1, 0)).verify_ms
        - moved(16384, gpu)
        for gpu in ("h100", "h200")
    )
    assert first == pytest.approx(second, rel=0.03)
    flops = 2 * 8.03e9 * 16384 / (989e12 * fit()["flops_share"])
    assert second == pytest.approx(1e3 * flops, rel=0.1)


@pytest.mark.parametrize("tokens", [512, 1024, 2048])
def test_what_only_moves_is_near_vidurs_layers(tokens: int) -> None:
    # Its medians of norms, rotary, gate and two sums of a layer of Llama-2-7B on an H100, in us.
    measured = {512: 50.0, 1024: 99.0, 2048: 194.6}
    logits = 1e-9 * tokens * 18 * 32000 / (3.35 * 0.6)
    ours = 1e3 * (moved_ms(H100_GPU, MODELS["llama-2-7b"], 1, tokens) - logits) / 32
    assert ours == pytest.approx(measured[tokens], rel=0.1)


def test_gpus_share_the_weights_but_pay_to_sum() -> None:
    one, two, eight = (verify_ms(f"roofline:h100/llama-3.1-70b:tp={tp}", 1) for tp in (1, 2, 8))
    assert one / 2 < two < one
    assert one / 8 < eight < two
    a100, h100 = GPUS["a100"], GPUS["h100"]
    assert all_reduce_ms(h100, 1, 1e6) == 0.0
    assert all_reduce_ms(h100, 8, 2 * 8192) == pytest.approx(0.0057, rel=0.1)
    assert all_reduce_ms(h100, 2, 8 << 20) == pytest.approx(0.0762, rel=0.15)
    assert all_reduce_ms(a100, 4, 1e7) > all_reduce_ms(h100, 4, 1e7)


def test_every_layer_sums_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    h100, model = GPUS["h100"], MODELS["llama-3.1-70b"]
    with_sums = roofs.layers_ms(h100, model, 8, 16)
    one_sum = all_reduce_ms(h100, 8, 16 * 8192 * 2)
    monkeypatch.setattr(roofs, "all_reduce_ms", lambda *_: 0.0)
    without = roofs.layers_ms(h100, model, 8, 16)
    assert with_sums - without == pytest.approx(2 * 80 * one_sum)


def step(placement: str, batch: int) -> StepTime:
    work = Work(4 * batch, batch, 1024 * batch, (batch,) * 3, 1024 * batch)
    return load_costs(f"roofline:h100/llama-3.1-70b+llama-3.2-1b{placement}").time(work)


def test_target_and_draft_have_their_own_gpus() -> None:
    both_on_one, apart, both_on_eight = (
        step(p, 16) for p in (":tp=1", ":tp=8,draft_tp=1", ":tp=8,draft_tp=8")
    )
    assert apart.verify_ms < both_on_one.verify_ms / 4
    assert apart.draft_ms.tolist() == both_on_one.draft_ms.tolist()
    assert both_on_eight.verify_ms == apart.verify_ms
    assert both_on_eight.draft_ms[DRAFT_MODEL] < apart.draft_ms[DRAFT_MODEL]
    assert step(":tp=8", 16).step_ms == apart.step_ms


@pytest.mark.parametrize("draft_tp", [2, 8])
def test_the_drafts_sums_are_charged_to_the_draft(
    monkeypatch: pytest.MonkeyPatch, draft_tp: int
) -> None:
    placement = f":tp=8,draft_tp={draft_tp}"
    talking = step(placement, 16)
    monkeypatch.setattr(roofs, "all_reduce_ms", lambda *_: 0.0)
    silent = step(placement, 16)
    monkeypatch.undo()
    size = 16 * 2
    draft = 33 * all_reduce_ms(H100_GPU, draft_tp, size * 2048)
    draft += all_reduce_ms(H100_GPU, draft_tp, size * 128256) / 2
    assert talking.draft_ms - silent.draft_ms == pytest.approx([0, 0, 3 * draft, 0], rel=1e-3)
    target = 161 * all_reduce_ms(H100_GPU, 8, 4 * size * 8192)
    target += all_reduce_ms(H100_GPU, 8, 4 * size * 128256) / 2
    assert talking.verify_ms - silent.verify_ms == pytest.approx(target, rel=1e-3)


def test_distinct_experts_are_the_expected_number() -> None:
    assert distinct_experts(1, 128, 8) == pytest.approx(8.0)
    assert distinct_experts(2, 128, 8) == pytest.approx(16 - 0.5)
    assert distinct_experts(1000, 128, 8) == pytest.approx(128.0)


def test_a_mixture_grows_at_once_and_a_dense_model_does_not() -> None:
    moe = "roofline:h200/qwen3-30b-a3b"
    assert load_costs(moe).bucket_edges == ()
    assert verify_ms(moe, 1, 3) > 1.5 * verify_ms(moe, 1)
    assert verify_ms(H200, 1, 3) < 1.05 * verify_ms(H200, 1)


@given(tokens=st.integers(1, 40_000), more=st.integers(1, 4096), kv=st.integers(0, 10**7))
def test_more_tokens_and_more_context_never_take_less(tokens: int, more: int, kv: int) -> None:
    for name in (H100, "h200_moe"):
        costs = load_costs(name)
        step = costs.time(Work(tokens, 1, kv)).verify_ms
        assert costs.time(Work(tokens + more, 1, kv)).verify_ms >= step
        assert costs.time(Work(tokens, 1, kv + more)).verify_ms > step


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_makes_a_cost_model(gpu: str, model: str) -> None:
    if gpu == "h100":
        assert verify_ms(f"roofline:{gpu}/{model}", 8) > 0.0
    assert roofline(gpu, model)["target"]["ms"][0] > 0.0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("roofline:h300/llama-3.1-8b", "no GPU 'h300'; there are a100"),
        ("roofline:h100/llama-9", "no model 'llama-9'; there are eagle"),
        ("roofline:h100/llama-3.1-8b+x", "no model 'x'"),
        ("roofline:h100/llama-3.1-8b:tp=3", "tp=3 must be 1, 2, 4 or 8"),
        ("roofline:h100/llama-3.1-8b:tp=0", "tp=0 must be"),
        ("roofline:h100/qwen2.5-7b:tp=8", "28 heads"),
        ("roofline:h100/llama-3.1-8b:tp=8,draft_tp=3", "draft_tp=3 must be 1, 2, 4 or 8"),
        ("roofline:h100/qwen2.5-7b:tp=4,draft_tp=4", "draft_tp=4 .* qwen2.5-0.5b's 14 heads"),
        ("roofline:h100/llama-3.1-8b:tp=8,draft_tp=", "must be like"),
        ("roofline:h100/llama-3.1-8b:tp=8,tp=2", "must be like"),
        ("roofline:h100/llama-3.1-8b:tp=", "must be like"),
        ("roofline:h100/llama-3.1-8b:dp=2", "must be like"),
        ("roofline:h100", "must be like"),
        ("roofline:", "must be like"),
    ],
)
def test_what_is_not_there_is_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        load_costs(name)
    assert "\n" not in str(refused.value)
