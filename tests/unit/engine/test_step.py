"""The step loop on the virtual backend: prefill, stops, reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.request import FinishReason, Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, StepCost, Task, Trace, TraceRow, VirtualBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import (
    BatchView,
    Plan,
    PlanSource,
    Proposer,
    StepOutcome,
    Truncated,
)

SURE = Task({Proposer.NGRAM: (1.0,), Proposer.DRAFT_MODEL: (1.0,)})
NEVER = Task({Proposer.NGRAM: (0.0,), Proposer.DRAFT_MODEL: (0.0,)})
SPEAK = SpeculationParams(task="t")


def make(task: Task, policy: str = "none", eos: tuple[int, ...] = (), **settings: object) -> Engine:
    backend = VirtualBackend(Hazards({"t": task}), StepCost(fixed_ms=10.0, token_ms=0.5))
    planner = LocalPlanner(make_policy(policy, settings, backend.limits()))
    return Engine(backend, planner, EngineConfig(token_budget=16), str, eos)


def run(engine: Engine) -> list[StepOutcome]:
    outcomes = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        outcomes.append(outcome)
    assert engine.step() is None
    return outcomes


def text_of(task: Task, tokens: int) -> list[int]:
    engine = make(task)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=tokens), SPEAK)
    run(engine)
    return request.output


def test_a_prompt_is_computed_in_chunks_and_then_yields_a_token() -> None:
    engine = make(SURE)
    request = engine.add(list(range(1, 41)), SamplingParams(max_tokens=2), SPEAK)
    outcomes = run(engine)
    assert [o.prefill_tokens for o in outcomes] == [16, 16, 8, 0]
    assert [int(o.emitted[0]) for o in outcomes] == [0, 0, 1, 1]
    assert request.finish_reason is FinishReason.LENGTH


def test_sure_drafts_cut_the_steps_and_never_pass_max_tokens() -> None:
    engine = make(SURE, "fixed", proposer="draft_model", k=3)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=10), SPEAK)
    outcomes = run(engine)
    assert [int(o.emitted[0]) for o in outcomes] == [1, 4, 4, 1]
    assert request.output == text_of(SURE, 10)
    assert outcomes[-1].truncated_by[0] == Truncated.LENGTH


def test_end_of_sequence_inside_an_accepted_run_crops_it() -> None:
    text = text_of(SURE, 10)
    engine = make(SURE, "fixed", (text[5],), proposer="ngram", k=8)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=10), SPEAK)
    outcomes = run(engine)
    assert request.output == text[:6]
    assert request.finish_reason is FinishReason.STOP
    assert outcomes[-1].truncated_by[0] == Truncated.EOS
    assert int(outcomes[-1].accepted[0]) == 8, "accepted is what held, before the crop"


def test_end_of_sequence_can_be_ignored() -> None:
    text = text_of(SURE, 10)
    engine = make(SURE, "fixed", (text[5],), proposer="ngram", k=8)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=10, ignore_eos=True), SPEAK)
    run(engine)
    assert request.output == text


def test_a_stop_string_across_a_step_edge_ends_the_request() -> None:
    text = text_of(SURE, 12)
    backend = VirtualBackend(Hazards({"t": SURE}))
    policy = make_policy("fixed", {"proposer": "ngram", "k": 2}, backend.limits())

    def spell(ids: object) -> str:
        assert isinstance(ids, list)
        return "".join(chr(97 + text.index(i)) for i in ids)

    engine = Engine(backend, LocalPlanner(policy), EngineConfig(), spell)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=12, stop=("defg", "zzz")), SPEAK)
    run(engine)
    assert spell(request.output) == "abcdefg"
    assert request.finish_reason is FinishReason.STOP


def test_step_time_is_what_the_clock_says() -> None:
    engine = make(NEVER, "fixed", proposer="draft_model", k=2)
    engine.add([1, 2, 3], SamplingParams(max_tokens=3), SPEAK)
    outcome = run(engine)[1]
    assert outcome.verify_ms == pytest.approx(10.0 + 0.5 * 2)
    assert outcome.draft_ms[Proposer.DRAFT_MODEL] == pytest.approx(1.05)
    assert outcome.step_ms == pytest.approx(outcome.verify_ms + 1.05)


def test_tokens_are_streamed_in_order_and_a_callback_may_abort() -> None:
    engine = make(SURE, "fixed", proposer="ngram", k=2)
    seen: list[int] = []

    def on_tokens(request: Request, tokens: list[int]) -> None:
        seen.extend(tokens)
        if len(seen) > 3:
            engine.abort(request)

    request = engine.add([1, 2, 3], SamplingParams(max_tokens=50), SPEAK, on_tokens)
    run(engine)
    assert request.finish_reason is FinishReason.ABORT
    assert seen == text_of(SURE, 4)[: len(seen)]
    assert engine.scheduler.target.free == engine.config.target_blocks


def test_a_trace_is_replayed_exactly() -> None:
    row = TraceRow(
        drafted={Proposer.NGRAM: [0, 4, 0, 0, 4, 4, 4, 4, 4]},
        accepted={Proposer.NGRAM: [0, 2, 0, 0, 1, 0, 4, 4, 4]},
        match_tokens=[0, 3, 0, 0, 3, 3, 3, 3, 3],
    )
    backend = VirtualBackend(Trace([row]))
    policy = make_policy("fixed", {"proposer": "ngram", "k": 4}, backend.limits())
    engine = Engine(backend, LocalPlanner(policy), EngineConfig())
    engine.add([1, 2, 3], SamplingParams(max_tokens=9), SPEAK)
    outcomes = run(engine)
    assert [int(o.accepted[0]) for o in outcomes] == [0, 2, 1, 2]
    assert [int(o.emitted[0]) for o in outcomes] == [1, 3, 2, 3]


def test_the_ngram_is_scored_in_the_shadow_of_other_proposers() -> None:
    task = Task({Proposer.NGRAM: (1.0, 1.0, 0.0)})
    engine = make(task)
    engine.add([1, 2, 3], SamplingParams(max_tokens=13), SPEAK)
    outcomes = run(engine)
    scored = [
        (int(o.shadow.matched[0]), int(o.shadow.observed[0])) for o in outcomes if len(o.shadow)
    ]
    assert scored == [(2, 3)] * 4
    assert all(int(o.verified_k.sum()) == 0 for o in outcomes)


def test_a_shadow_that_could_not_be_seen_to_its_end_says_so() -> None:
    engine = make(Task({Proposer.NGRAM: (1.0,)}))
    engine.add([1, 2, 3], SamplingParams(max_tokens=6), SPEAK)
    shadows = [o.shadow for o in run(engine) if len(o.shadow)]
    assert len(shadows) == 1
    assert (shadows[0].offered_k[0], shadows[0].matched[0], shadows[0].observed[0]) == (8, 5, 5)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "the prompt is empty"),
        (list(range(9000)), "shorten the prompt"),
        ([1, -1], "token id -1; the model's are 0 to 8999"),
        ([1, 9000, 2], "token id 9000;"),
        ([1.0, 2], "whole numbers"),
        ("hello", "whole numbers"),
    ],
)
def test_prompts_that_cannot_run_are_refused(prompt: Any, text: str) -> None:
    engine = make(SURE)
    engine.config = dataclasses.replace(engine.config, vocab_tokens=9000)
    with pytest.raises(ValueError, match=text):
        engine.add(prompt)
    assert not engine.has_work


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}, {"stop": ("",)},
        {"max_tokens": 1.5}, {"max_tokens": float("nan")}, {"seed": 1.5}, {"seed": True},
        {"logprobs": -1}, {"stop": "abc"}, {"stop": (1,)}, {"top_k": "3"},
    ],
)  # fmt: skip
def test_sampling_refuses_what_is_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        SamplingParams(**bad)


def test_speculation_refuses_what_is_out_of_range() -> None:
    for bad in ({"max_k": 1000}, {"max_k": 2.0}, {"proposer_mask": 1.5}, {"task": 5}):
        with pytest.raises(ValueError, match="must be"):
            SpeculationParams(**bad)
    with pytest.raises(ValueError, match="task must be"):
        SpeculationParams(task="\ud800")
    for target in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="tpot_target_ms must be"):
            SpeculationParams(tpot_target_ms=target)


class Watched:
    """A planner that keeps the views it is shown."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.views: list[BatchView] = []

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        self.views.append(view)
        return self.planner.plan(view)

    def observe(self, outcome: StepOutcome) -> None:
        self.planner.observe(outcome)

    def close(self) -> None:
        self.planner.close()


def test_the_view_says_what_is_left() -> None:
    engine = make(SURE, "fixed", proposer="ngram", k=8)
    watched = Watched(engine.planner)
    engine.planner = watched
    engine.add(list(range(1, 30)), SamplingParams(max_tokens=4), SPEAK)
    run(engine)
    assert [int(v.max_k[0]) for v in watched.views] == [0, 0, 2]
    assert [int(v.prefill_tokens[0]) for v in watched.views] == [16, 13, 0]
    assert np.all(watched.views[-1].proposer_mask == 0b1111)


def test_a_callback_that_raises_ends_its_own_request_only() -> None:
    engine = make(SURE)
    heard: list[int] = []

    def gone(request: Request, tokens: list[int]) -> None:
        raise OSError("client gone")

    def hears(request: Request, tokens: list[int]) -> None:
        heard.extend(tokens)

    first = engine.add([1, 2, 3], SamplingParams(max_tokens=5), SPEAK, gone)
    second = engine.add([1, 2, 3], SamplingParams(max_tokens=5), SPEAK, hears)
    with pytest.raises(OSError, match="client gone"):
        engine.step()
    run(engine)
    assert first.finish_reason is FinishReason.ABORT
    assert heard == second.output
    assert len(heard) == 5
    assert engine.scheduler.target.free == engine.config.target_blocks


def test_a_request_that_another_callback_aborts_hears_nothing_more() -> None:
    engine = make(SURE)
    heard: list[int] = []
    engine.add([1, 2], SamplingParams(max_tokens=5), SPEAK, lambda *_: engine.abort(second))
    second = engine.add(
        [1, 2], SamplingParams(max_tokens=5), SPEAK, lambda _, tokens: heard.extend(tokens)
    )
    run(engine)
    assert second.finish_reason is FinishReason.ABORT
    assert heard == []
