import pytest
from tests.tiny import tiny_backend

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.step import Engine
from parlay.policies.policy import make_policy
from parlay.sim.record import greedy

PROMPTS = [[1, 2, 3], [4, 0], [2, 2, 2, 1], [3]]


def test_recorded_answers_are_what_the_engine_says_when_it_drafts() -> None:
    heard: list[int] = []
    found = greedy(tiny_backend(), PROMPTS, (), 12, lambda: heard.append(1))
    assert len(heard) == len(PROMPTS)
    backend = tiny_backend()
    policy = make_policy("fixed", {"proposer": "draft_model", "k": "3"}, backend.limits())
    engine = Engine(backend, LocalPlanner(policy), backend.config)
    requests = [engine.add(ids, SamplingParams(max_tokens=12)) for ids in PROMPTS]
    while engine.has_work:
        engine.step()
    assert found == [r.tokens[len(ids) :] for r, ids in zip(requests, PROMPTS, strict=True)]


@pytest.mark.parametrize("eos", range(5))
def test_an_answer_ends_with_its_end_token(eos: int) -> None:
    for out in greedy(tiny_backend(), PROMPTS, (eos,), 12, lambda: None):
        assert len(out) == 12 or out[-1] == eos
        assert eos not in out[:-1]
