"""Draws at the edges of floating point, and noise that is used once."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, tiny_backend

from parlay.engine.planner import LocalPlanner
from parlay.engine.proposers import draft_model
from parlay.engine.request import SamplingParams
from parlay.engine.sampling import (
    exponentials,
    first_choices,
    mix64,
    probabilities,
    race,
    uniform,
)
from parlay.engine.step import Engine
from parlay.policies.types import Proposer

_MASK, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


def unmixed(y: int) -> int:
    """Return the x with mix64(x) == y."""
    for shift, odd in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        x = y
        for _ in range(3):
            x = y ^ (x >> shift)
        y = x * pow(odd, -1, 1 << 64) & _MASK
    return y


@pytest.mark.parametrize("bits", [0, _MASK])
def test_no_draw_is_exactly_0_or_1(bits: int) -> None:
    key = unmixed(bits)
    assert mix64(key) == bits
    assert 0.0 < uniform(key) < 1.0
    keys, ids = [(key - _GOLDEN) & _MASK], torch.arange(3)
    assert 0.0 < float(exponentials(keys, ids)[0, 0]) < float("inf")
    law = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64)
    assert int(race(law, keys, ids)) != 0, "a token of probability 0 was drawn"


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 1e-308, 5e-324])
def test_a_temperature_near_0_is_nearly_greedy(temperature: float) -> None:
    law = probabilities(torch.tensor([[5.0, 20.0, 10.0]]), [SamplingParams(temperature)])
    assert law.tolist() == [[0.0, 1.0, 0.0]]


def test_a_row_without_top_p_does_not_lose_its_tail_to_a_neighbour_with_it() -> None:
    # Sums of 1/3 and thirds of it pass 1 by rounding long before the tail.
    logits = torch.log(torch.tensor([1.0, 1.0, 1.0] + [1e-17] * 5, dtype=torch.float64))[None]
    alone = probabilities(logits, [SamplingParams(1.0)])
    mixed = probabilities(logits.repeat(2, 1), [SamplingParams(1.0), SamplingParams(1.0, 0, 0.5)])
    assert torch.equal(alone[0], mixed[0])


def test_a_top_k_above_the_vocabulary_is_off() -> None:
    logits = torch.randn(1, 7)
    expected = probabilities(logits, [SamplingParams(1.0)])
    assert torch.equal(probabilities(logits, [SamplingParams(1.0, top_k=10**30)]), expected)


def test_no_noise_of_a_draft_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # A policy sees what a discarded draft did (its length, its confidences); were its noise drawn
    # again in the next step, choosing k by that would be choosing k by the token itself.
    used: list[int] = []

    def watched(law: torch.Tensor, keys: list[int], ids: torch.Tensor) -> torch.Tensor:
        used.extend(keys)
        return race(law, keys, ids)

    monkeypatch.setattr(draft_model, "race", watched)
    policy = AnyPlan((Proposer.DRAFT_MODEL,), 4)
    engine = Engine(tiny_backend(), LocalPlanner(policy), CONFIG)
    for _ in range(4):
        engine.add([1, 2, 3], SamplingParams(1.0, max_tokens=30))
    while engine.has_work:
        engine.step()
    assert len(used) > 100
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [128, 1024, 1000])
def test_the_first_of_the_largest_logits_is_chosen(dtype: torch.dtype, vocab: int) -> None:
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.randn(64, vocab, generator=rng).mul(2).round().to(dtype)  # full of ties
    logits[1] = -logits[1].abs() - 1
    logits[2] = 0.0
    logits[3, 7:9] = 3e38
    assert torch.equal(first_choices(logits), logits.float().argmax(-1))
    # Rows without any logit above 0 send the whole batch another way.
    high = logits + 20
    assert torch.equal(first_choices(high), high.float().argmax(-1))
