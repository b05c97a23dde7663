"""The overlapped loop: plans made during passes, the same text, and nobody's report lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.serving import tiny_checkpoint
from tests.tiny import CONFIG, AnyPlan, tiny_backend

from parlay.engine.generate import Placement, generate, open_engine
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.torch_backend import Flying, TorchBackend
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import (
    Array,
    BatchView,
    Plan,
    PlanSource,
    Proposer,
    StepOutcome,
)

ALL = (Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL)
SPEAK = SpeculationParams(task="t")
LIKELY = Task({Proposer.NGRAM: (0.8,), Proposer.DRAFT_MODEL: (0.7,)})


class Diary(LocalPlanner):
    """Writes down what it is asked and told, in order."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(AnyPlan(ALL, 4))
        self.lines: list[tuple[str, int]] = []
        self.fails_at = fails_at

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        if view.step_id == self.fails_at:
            self.fails_at = None
            raise ArithmeticError("a policy's fault")
        self.lines.append(("plan", view.step_id))
        return super().plan(view)

    def observe(self, outcome: StepOutcome) -> None:
        self.lines.append(("observe", outcome.step_id))


def overlapped(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, overlap=True)


def virtual(planner: LocalPlanner) -> Engine:
    backend = VirtualBackend(Hazards({"t": LIKELY}))
    return Engine(backend, planner, overlapped(EngineConfig(token_budget=16)))


def run(engine: Engine) -> list[StepOutcome]:
    outcomes = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        outcomes.append(outcome)
    return outcomes


def texts(backend: TorchBackend, overlap: bool, sampling: SamplingParams, seed: int) -> list[Array]:
    config = dataclasses.replace(backend.config, overlap=overlap)
    engine = Engine(backend, LocalPlanner(AnyPlan(ALL, 4, seed)), config)
    rng = np.random.default_rng(3)
    requests: list[Request] = []
    for n in rng.integers(2, 30, 12):
        requests.append(engine.add(rng.integers(0, 5, n).tolist(), sampling))
        engine.step()
    run(engine)
    assert engine.scheduler.target.free == engine.scheduler.target.total
    return [np.asarray(r.output) for r in requests]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.8, seed=11),
    ],
    ids=["greedy", "coupled"],
)
def test_texts_are_those_of_the_plain_loop(sampling: SamplingParams) -> None:
    plain = texts(tiny_backend(), False, sampling, 1)
    for seed in (1, 2):
        for ours, theirs in zip(texts(tiny_backend(), True, sampling, seed), plain, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_they_are_under_preemption_and_shared_prefixes_too() -> None:
    small = dataclasses.replace(CONFIG, target_blocks=24, draft_blocks=20, max_running=6)
    sampling = SamplingParams(max_tokens=30)
    plain = texts(tiny_backend(config=small), False, sampling, 1)
    for ours, theirs in zip(
        texts(tiny_backend(config=small), True, sampling, 4), plain, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


class Aborting(LocalPlanner):
    """Aborts a request while the pass of its step runs."""

    victim: Request | None = None
    engine: Engine

    def observe(self, outcome: StepOutcome) -> None:
        super().observe(outcome)
        if self.victim is not None and outcome.step_id == 5:
            self.engine.abort(self.victim)


def test_who_is_aborted_while_the_pass_runs_holds_up_nobody() -> None:
    def outputs(abort: bool) -> list[list[int]]:
        planner = Aborting(AnyPlan(ALL, 4))
        planner.engine = engine = Engine(tiny_backend(), planner, overlapped(CONFIG))
        sampling = SamplingParams(max_tokens=24)
        requests = [engine.add([1, 2, 3, i], sampling, SPEAK) for i in range(3)]
        planner.victim = requests[1] if abort else None
        run(engine)
        assert engine.scheduler.target.free == engine.scheduler.target.total
        assert engine.scheduler.draft.free == engine.scheduler.draft.total
        return [requests[0].output, requests[2].output]

    assert outputs(abort=True) == outputs(abort=False)


def test_a_plan_is_made_a_step_ahead_and_before_its_outcome_is_known() -> None:
    planner = Diary()
    engine = virtual(planner)
    engine.add([1, 2, 3], SamplingParams(max_tokens=12), SPEAK)
    outcomes = run(engine)
    steps = len(outcomes)
    assert steps > 3
    wanted = [("plan", 0), ("plan", 0)]
    for step in range(1, steps):
        wanted += [("observe", step - 1), ("plan", step)]
    assert planner.lines == [*wanted, ("observe", steps - 1)]
    assert [int(o.plan_step_id[0]) for o in outcomes] == [0, *range(steps - 1)]


def test_what_was_made_ahead_of_a_pause_is_not_used_behind_it() -> None:
    planner = Diary()
    engine = virtual(planner)
    engine.add([1, 2, 3], SamplingParams(max_tokens=4), SPEAK)
    before = len(run(engine))
    assert engine.step() is None
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=4), SPEAK)
    outcome = engine.step()
    assert outcome is not None
    assert outcome.plan_step_id.tolist() == [before]
    assert outcome.request_id.tolist() == [request.request_id]


def test_what_was_made_ahead_of_an_abort_is_not_used_behind_it() -> None:
    engine = virtual(Diary())
    first = engine.add([1, 2, 3], SamplingParams(max_tokens=40), SPEAK)
    for _ in range(3):
        engine.step()
    engine.abort(first)
    engine.add([1, 2, 3], SamplingParams(max_tokens=4), SPEAK)
    outcome = engine.step()
    assert outcome is not None
    assert outcome.plan_step_id.tolist() == [3]


def test_a_request_that_is_aborted_between_steps_loses_nobodys_report() -> None:
    planner = Diary()
    engine = virtual(planner)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=40), SPEAK)
    for _ in range(3):
        engine.step()
    engine.abort(request)
    assert [step for what, step in planner.lines if what == "observe"] == [0, 1, 2]


def test_the_pass_lands_though_the_policy_fails_beside_it() -> None:
    backend, planner = tiny_backend(), Diary(fails_at=2)
    engine = Engine(backend, planner, overlapped(backend.config))
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=10))
    landed = 0

    def land(flying: Flying) -> object:
        nonlocal landed
        landed += 1
        return TorchBackend.land(backend, flying)

    backend.land = land  # type: ignore[method-assign, assignment]
    engine.step()
    engine.step()
    with pytest.raises(ArithmeticError, match="a policy's fault"):
        engine.step()
    assert landed == 3
    run(engine)
    plain = texts_of_one(10)
    assert request.output == plain


def texts_of_one(tokens: int) -> list[int]:
    backend = tiny_backend()
    engine = Engine(backend, LocalPlanner(make_policy("none")), backend.config)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=tokens))
    run(engine)
    return request.output


def test_time_beside_a_pass_is_not_the_passs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now_s = 0.0

        def perf_counter(self) -> float:
            return self.now_s

    class Slow(LocalPlanner):
        def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
            clock.now_s += 0.05
            return super().plan(view)

    clock = Clock()
    monkeypatch.setattr("parlay.engine.torch_backend.time", clock)
    monkeypatch.setattr("parlay.engine.timing.time", clock)
    backend = tiny_backend()
    engine = Engine(backend, Slow(make_policy("none")), overlapped(backend.config))
    engine.add([1, 2, 3], SamplingParams(max_tokens=8))
    outcomes = run(engine)
    assert [o.verify_ms for o in outcomes] == pytest.approx([0.0] * len(outcomes), abs=1e-6)
    assert [o.step_ms for o in outcomes[1:]] == pytest.approx([50.0] * (len(outcomes) - 1))


def test_an_engine_is_opened_with_it_but_under_a_sidecar(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    runs = Placement("float32", overlap=True)
    policy = ("fixed", {"proposer": "ngram", "k": 2})
    with open_engine(folder, *policy, None, runs) as (engine, tokenizer):
        assert engine.config.overlap
        assert type(engine.planner) is LocalPlanner
        done = generate(engine, tokenizer, [1, 2, 3], SamplingParams(max_tokens=8), print)
    assert done.output_tokens == 8
    with open_engine(folder, *policy, f"unix:{tmp_path}/nobody", runs) as (engine, _):
        assert not engine.config.overlap  # its plans are a step old as they come
    with open_engine(folder, *policy, None, Placement("float32")) as (engine, _):
        assert not engine.config.overlap
