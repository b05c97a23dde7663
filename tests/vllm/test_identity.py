"""Steered, vLLM answers what it answers without speculation: greedily, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, NONE, Proposer

METHODS = {
    "ngram": (NONE, NGRAM),
    "draft_model": (NONE, NGRAM, DRAFT_MODEL),
    "medusa": (NONE, NGRAM, MEDUSA),
    "suffix": (NONE, NGRAM),  # vLLM's own, in the n-gram's column
}


@pytest.fixture(scope="module", params=METHODS)
def steered(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[tuple[str, Any]]:
    from tests.tiny_vllm import engine

    if request.param == "suffix":
        pytest.importorskip("arctic_inference", reason="suffix needs arctic-inference==0.1.1")
    # Room for about half of the eight requests that run at once: the others are preempted.
    with engine(checkpoints, request.param, block_size=32, num_gpu_blocks_override=14) as llm:
        yield request.param, llm


def test_random_lengths_change_no_answer(
    steered: tuple[str, Any], plain_answers: list[list[int]]
) -> None:
    from tests.tiny_vllm import answers, decide_at_random, metric, prompts, scheduler_of

    method, llm = steered
    arms = [Proposer(p) for p in METHODS[method]]
    decide_at_random(llm, *arms)
    steering = scheduler_of(llm).parlay
    assert answers(llm, prompts(50)) == plain_answers
    assert scheduler_of(llm).parlay is steering, "it stopped steering"
    counters = steering.adapter.counters
    assert counters.errors == 0
    assert metric(llm, "num_preemptions") > 5
    # What we count is what vLLM counts, but for drafts of a request that had to wait a step.
    verified = metric(llm, "spec_decode_num_draft_tokens")
    assert 0.97 * verified <= counters.drafted.sum() <= 1.2 * verified
    for arm in arms[1:]:
        assert counters.drafted[arm] > 100
        assert counters.accepted[arm] > 0
