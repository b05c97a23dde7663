"""The same where vLLM schedules a step before the tokens of the last are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parlay.policies.types import DRAFT_MODEL, NONE, Proposer


@pytest.fixture(scope="module")
def steered(checkpoints: Path) -> Iterator[Any]:
    from tests.tiny_vllm import asynchronous, engine

    with asynchronous(), engine(checkpoints, "draft_model", async_scheduling=True) as llm:
        yield llm


def test_random_lengths_change_no_answer(steered: Any, plain_answers: list[list[int]]) -> None:
    from tests.tiny_vllm import answers, decide_at_random, prompts, scheduler_of

    scheduler = scheduler_of(steered)
    assert type(scheduler).__name__ == "ParlayAsyncScheduler"
    steering = scheduler.parlay
    assert steering.ability.asynchronous
    decide_at_random(steered, Proposer(NONE), Proposer(DRAFT_MODEL))
    assert answers(steered, prompts(50)) == plain_answers
    assert scheduler.parlay is steering, "it stopped steering"
    assert steering.adapter.counters.errors == 0
    assert steering.adapter.counters.drafted[DRAFT_MODEL] > 100
    assert steering.adapter.counters.accepted[DRAFT_MODEL] > 0
