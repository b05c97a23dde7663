"""What requests may ask for, and what goes wrong around them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parlay.engine.planner import LocalPlanner
from parlay.policies.policy import Stateless
from parlay.policies.types import DRAFT_MODEL, NGRAM, BatchView, Plan, Proposer, StepOutcome


class Watched:
    """A planner that keeps what it passes on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.heard: list[StepOutcome] = []
        self.views: list[BatchView] = []

    def plan(self, view: BatchView) -> Any:
        self.views.append(view)
        return self.inner.plan(view)

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)
        self.inner.observe(outcome)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def steered(checkpoints: Path) -> Iterator[Any]:
    from tests.tiny_vllm import engine

    with engine(checkpoints, "draft_model") as llm:
        yield llm


@pytest.fixture
def watched(steered: Any) -> Watched:
    from tests.tiny_vllm import decide_at_random, scheduler_of

    decide_at_random(steered, Proposer(NGRAM), Proposer(DRAFT_MODEL))
    adapter = scheduler_of(steered).parlay.adapter
    watched = adapter.planner = Watched(adapter.planner)
    return watched


def test_the_default_policy_drafts_and_changes_no_answer(
    steered: Any, plain_answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny_vllm import answers, metric, prompts, scheduler_of

    # Its own step times would say of a machine that others use that no draft is worth it.
    ticks = itertools.count()
    monkeypatch.setattr(scheduler_of(steered).parlay, "clock", lambda: 1e-3 * next(ticks))
    counters = scheduler_of(steered).parlay.adapter.counters
    assert answers(steered, prompts(50)) == plain_answers
    assert counters.drafted[DRAFT_MODEL] > 100
    # Nothing was preempted: every draft that was kept was verified, and vLLM counts the same.
    assert counters.drafted.sum() == metric(steered, "spec_decode_num_draft_tokens")
    assert counters.accepted.sum() == metric(steered, "spec_decode_num_accepted_tokens")


def test_who_opts_out_is_not_drafted_for(steered: Any, watched: Watched) -> None:
    from tests.tiny_vllm import answers, prompts

    asked = prompts(6)
    hints: list[Any] = [{"parlay_speculate": False}, {"parlay_max_k": "2", "other": 1}] * 3
    answers(steered, asked, extra_args=hints)
    limits: dict[int, int] = {}
    for view in watched.views:
        for name, k in zip(view.request_id.tolist(), view.max_k.tolist(), strict=True):
            limits[name] = max(limits.get(name, 0), k)
    assert sorted(limits.values()) == [0, 0, 0, 2, 2, 2]
    drafted: dict[int, int] = {}
    for outcome in watched.heard:
        for name, k in zip(outcome.request_id.tolist(), outcome.verified_k.tolist(), strict=True):
            drafted[name] = max(drafted.get(name, 0), k)
    assert drafted == limits


def test_sampled_requests_complete(steered: Any, watched: Watched) -> None:
    from tests.tiny_vllm import answers, prompts

    done = answers(steered, prompts(12), temperature=0.9, top_p=0.9, max_tokens=30)
    assert [len(tokens) for tokens in done] == [30] * 12
    assert any((view.temperature > 0.8).all() for view in watched.views)


def test_structured_requests_complete(steered: Any, watched: Watched) -> None:
    import vllm
    from tests.tiny_vllm import prompts
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}
    form = StructuredOutputsParams(json=json.dumps({**schema, "additionalProperties": False}))
    how = vllm.SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=form)
    free = vllm.SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    done = steered.generate(prompts(8), [how, free] * 4, use_tqdm=False)
    for one in done[::2]:
        ids = one.outputs[0].token_ids  # its text begins with halves of the prompt's letters
        written = steered.get_tokenizer().decode(ids, skip_special_tokens=True)
        assert json.loads(written)["a"] in ("one", "two")
    assert all(len(one.outputs[0].token_ids) == 30 for one in done[1::2])
    assert sum(int(o.verified_k.sum()) for o in watched.heard) > 0


def test_where_the_policy_fails_answers_stay(steered: Any, plain_answers: list[list[int]]) -> None:
    from tests.tiny_vllm import answers, metric, prompts, scheduler_of

    class Broken(Stateless):
        name = "broken"

        def decide(self, view: BatchView) -> Plan:
            raise RuntimeError("no idea")

    steering = scheduler_of(steered).parlay
    steering.adapter.planner = LocalPlanner(Broken())
    before = metric(steered, "spec_decode_num_draft_tokens")
    assert answers(steered, prompts(10)) == plain_answers[:10]
    assert metric(steered, "spec_decode_num_draft_tokens") == before
    assert scheduler_of(steered).parlay is steering


def test_one_k_for_the_batch_changes_no_answer(
    steered: Any, watched: Watched, plain_answers: list[list[int]], monkeypatch: Any
) -> None:
    from tests.tiny_vllm import answers, prompts, scheduler_of

    steering = scheduler_of(steered).parlay
    monkeypatch.setattr(steering, "ability", dataclasses.replace(steering.ability, uniform=True))
    assert answers(steered, prompts(50)) == plain_answers
    lengths = [o.verified_k[o.emitted > 0] for o in watched.heard if (o.emitted > 0).sum() == 8]
    assert sum(len(set(k.tolist())) == 1 for k in lengths) > 0.6 * len(lengths) > 3
    assert {int(k.max()) for k in lengths} >= {1, 2, 3}


def test_step_times_are_told(steered: Any, watched: Watched) -> None:
    from tests.tiny_vllm import answers, prompts

    answers(steered, prompts(8))
    assert len(watched.heard) > 10
    for outcome in watched.heard:
        assert 0.0 < outcome.verify_ms <= outcome.step_ms + 1e-3
        assert outcome.padded_tokens > 0
    assert any(float(o.draft_ms[DRAFT_MODEL]) > 0.0 for o in watched.heard)
    assert watched.heard[0].draft_depth <= 5
