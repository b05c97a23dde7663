"""Logprobs are the model's own, the same under any speculation, and only of those who ask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, tiny_backend

from parlay.engine.logprobs import logprobs_of
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams, TokenLogprob
from parlay.engine.step import Engine
from parlay.engine.verify import places_of
from parlay.policies.types import Proposer

VOCAB, PROMPT = 6, [1, 2, 3, 2]


def run(k_max: int, *each: SamplingParams) -> list[Request]:
    plans = AnyPlan((Proposer.NGRAM, Proposer.DRAFT_MODEL), k_max)
    engine = Engine(tiny_backend(VOCAB), LocalPlanner(plans), CONFIG)
    requests = [engine.add(PROMPT, sampling) for sampling in each]
    while engine.has_work:
        engine.step()
    return requests


def law(tokens: list[int]) -> torch.Tensor:
    """The log-probabilities of what follows `tokens`, from a pass of its own."""
    engine = Engine(tiny_backend(VOCAB), LocalPlanner(AnyPlan((Proposer.NONE,), 0)), CONFIG)
    request = engine.add(tokens, SamplingParams(max_tokens=1, logprobs=VOCAB))
    engine.step()
    values = torch.zeros(VOCAB)
    for token, value in request.logprobs[0].top:
        values[token] = value
    return values


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_committed_token_has_that_of_its_place(temperature: float) -> None:
    asks = SamplingParams(temperature=temperature, seed=5, max_tokens=30, logprobs=2)
    (request,) = run(4, asks)
    assert request.accepted > 0
    assert [lp.token for lp in request.logprobs] == request.output
    for at, found in enumerate(request.logprobs):
        expected = law(PROMPT + request.output[:at])
        assert float(expected.exp().sum()) == pytest.approx(1.0, abs=1e-5)
        assert found.logprob == pytest.approx(float(expected[found.token]), abs=1e-4)
        best = expected.topk(2).values.tolist()
        assert [value for _, value in found.top] == pytest.approx(best, abs=1e-4)


def test_speculation_does_not_change_them_and_none_are_kept_for_others() -> None:
    asks = SamplingParams(max_tokens=20, logprobs=3)
    quiet = SamplingParams(max_tokens=20)
    first, other, second = run(4, asks, quiet, SamplingParams(max_tokens=9, logprobs=0))
    (alone,) = run(0, asks)
    assert other.logprobs == []
    assert [lp.token for lp in second.logprobs] == second.output == first.output[:9]
    assert all(lp.top == () for lp in second.logprobs)
    assert first.output == alone.output
    for a, b in zip(first.logprobs, alone.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert [t for t, _ in a.top] == [t for t, _ in b.top]


def test_a_path_through_a_tree_reads_its_own_places() -> None:
    logits = torch.arange(5 * 4, dtype=torch.float32).reshape(5, 4).sin() * 9
    request = Request(1, [0], 1, SamplingParams(logprobs=1))
    places = places_of(np.asarray([0]), np.zeros((1, 4), np.int64), np.asarray([4], np.int32))
    tokens, path = np.asarray([[2, 1, 3, -1]]), np.asarray([[1, 3, -1]])
    found = logprobs_of(logits, [request], places, np.asarray([2]), tokens, path)
    expected = torch.log_softmax(logits[[0, 2, 4]], -1)
    assert [lp.token for lp in found[0]] == [2, 1, 3]
    for j, lp in enumerate(found[0]):
        assert lp.logprob == pytest.approx(float(expected[j, lp.token]), abs=1e-6)
        assert lp.top[0][0] == int(expected[j].argmax())
    assert isinstance(found[0][0], TokenLogprob)
