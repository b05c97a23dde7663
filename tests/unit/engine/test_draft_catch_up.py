"""The draft model: what idle rows read, what ragged rows cost, other dtypes than the target's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, step, tiny_backend

from parlay.engine.planner import LocalPlanner
from parlay.engine.proposers.draft_model import STEADY_TOKENS
from parlay.engine.request import SamplingParams
from parlay.engine.runner import Runner
from parlay.engine.scheduler import EngineConfig
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.policies.policy import Stateless
from parlay.policies.types import BatchView, Plan, Proposer, StopKind, StopRule

DRAFT = Proposer.DRAFT_MODEL
VOCAB = 40
LONG = dataclasses.replace(CONFIG, context_tokens=640, draft_window_tokens=640)


class When(Stateless):
    """Drafts k tokens with the draft model where `on(step)` says so."""

    name = "when"

    def __init__(self, k: int, on: Callable[[int], bool]) -> None:
        self.k, self.on, self.lags = k, on, list[list[int]]()

    def decide(self, view: BatchView) -> Plan:
        self.lags.append(view.draft_kv_lag.tolist())
        plan = AnyPlan((DRAFT,), self.k, fixed_k=True).decide(view)
        plan.k[:] = self.k if self.on(view.step_id) else 0
        return plan


class Fed:
    """How many tokens of how many rows each pass of the draft model reads."""

    def __init__(self, runner: Runner) -> None:
        self.passes: list[list[int]] = []
        run = runner._run

        def counted(ids: torch.Tensor, spans: Spans, *rest: Any) -> torch.Tensor:
            self.passes.append(list(spans.lengths))
            return run(ids, spans, *rest)

        runner._run = counted  # type: ignore[method-assign,assignment]


def engine_of(
    policy: Stateless, config: EngineConfig = CONFIG, **options: Any
) -> tuple[Engine, Fed]:
    backend = tiny_backend(VOCAB, config=config, **options)
    assert backend.draft is not None
    engine = Engine(backend, LocalPlanner(policy), config)  # type: ignore[arg-type]
    return engine, Fed(backend.draft.runner)


def prompt(i: int, tokens: int) -> list[int]:
    return [(7 * i + i * j * j + j) % VOCAB for j in range(tokens)]


def answers(config: EngineConfig, policy: Stateless, tokens: int, rows: int = 4) -> list[list[int]]:
    engine, _ = engine_of(policy, config)
    requests = [engine.add(prompt(i, 40), SamplingParams(max_tokens=tokens)) for i in range(rows)]
    while engine.has_work:
        step(engine)
    return [r.output for r in requests]


@pytest.mark.parametrize("state_layers", [(), (1, 2)])
def test_idle_rows_catch_up_by_so_many_tokens_a_step(state_layers: tuple[int, ...]) -> None:
    config = dataclasses.replace(CONFIG, draft_catch_up_tokens=24)
    policy = When(2, lambda step: step >= 3)
    engine, fed = engine_of(policy, config, state_layers=state_layers)
    requests = [engine.add(prompt(i, 40), SamplingParams(max_tokens=40)) for i in range(4)]
    drafted: list[list[bool]] = []
    while engine.has_work:
        before = [(len(r.tokens), r.draft_computed) for r in requests]
        fed.passes.clear()
        outcome = step(engine)
        if not fed.passes or any(r.finished for r in requests):
            continue
        idle = sum(n for n in fed.passes[0] if n > STEADY_TOKENS)
        assert idle <= 24
        assert sum(fed.passes[0]) <= 24 + 4 * STEADY_TOKENS
        drafted.append((outcome.drafted_k > 0).tolist())
        for row, request in enumerate(requests):
            tokens, computed = before[row]
            assert policy.lags[-1][row] == tokens - max(computed, tokens - 64)
            if not drafted[-1][row]:
                assert request.draft_computed - computed <= 24
                assert request.draft_computed <= tokens
    assert [sum(d) for d in drafted[:8]] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert all(all(d) for d in drafted[8:])
    plain = answers(config, When(0, lambda step: True), 40)
    assert [r.output for r in requests] == plain


def by_position(
    config: EngineConfig, on: Callable[[int], bool], tokens: int, **options: Any
) -> dict[int, tuple[list[float], int]]:
    """Return confidences and how many drafts held, by output position; one request."""
    engine, _ = engine_of(When(3, on), config, **options)
    # Coupled: what holds at a position does not depend on the steps before.
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=tokens)
    request = engine.add(prompt(3, 12), sampling)
    found = {}
    while engine.has_work:
        position = request.output_tokens
        outcome = step(engine)
        if outcome.drafted_k[0] == 3:
            found[position] = (outcome.confidences[0].tolist(), int(outcome.accepted[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("state_layers", [(), (1, 2)])
def test_after_500_steps_off_it_accepts_what_it_would_have_accepted(
    state_layers: tuple[int, ...],
) -> None:
    config = dataclasses.replace(LONG, draft_catch_up_tokens=64)
    options = {"state_layers": state_layers}
    always = by_position(config, lambda step: True, 620, **options)
    late = by_position(config, lambda step: step > 500, 620, **options)
    # 512 unread tokens, 64 a step: it drafts from the eighth step on.
    assert 505 <= min(late) <= 512
    shared = sorted(set(always) & set(late))
    assert len(shared) > 20
    for position in shared:
        assert late[position][0] == pytest.approx(always[position][0], abs=1e-4)
    assert sum(late[p][1] for p in shared) == sum(always[p][1] for p in shared) > 0


def test_a_pause_inside_the_window_loses_nothing_one_beyond_it_what_came_before() -> None:
    config = dataclasses.replace(LONG, draft_window_tokens=32)
    always = by_position(config, lambda step: True, 150)
    short = by_position(config, lambda step: not 20 < step < 50, 150)
    shared = [p for p in set(always) & set(short) if p > 50]
    assert len(shared) > 10
    for p in shared:
        assert short[p][0] == pytest.approx(always[p][0], abs=1e-5)
    long = by_position(config, lambda step: not 20 < step < 90, 150)
    shared = [p for p in set(always) & set(long) if p > 90]
    assert any(abs(long[p][0][0] - always[p][0][0]) > 1e-3 for p in shared)


@pytest.mark.parametrize("kind", [None, StopKind.PROBABILITY, StopKind.SURVIVAL, StopKind.ENTROPY])
def test_a_row_that_stops_costs_no_further_rows(kind: StopKind | None) -> None:
    rule = StopRule(kind, 0.25 if kind is not StopKind.ENTROPY else 0.6) if kind else None
    policy = AnyPlan((DRAFT, Proposer.NONE), 5, seed=1, stop_rule=rule)
    engine, fed = engine_of(policy)
    for i in range(6):
        engine.add(prompt(i, 9), SamplingParams(max_tokens=30, temperature=0.7 * (i % 2)))
    ragged = stopped = 0
    while engine.has_work:
        fed.passes.clear()
        outcome = step(engine)
        # A row is read for the place where it stops, and for none behind it.
        most = outcome.drafted_k + (kind in (StopKind.SURVIVAL, StopKind.ENTROPY))
        most = np.minimum(most, outcome.requested_k)
        considered = np.isfinite(outcome.confidences).sum(0)
        assert np.all(np.isfinite(outcome.confidences).sum(1) == most)
        stopped += int((outcome.drafted_k < outcome.requested_k).sum())
        assert [len(rows) for rows in fed.passes] == considered[considered > 0].tolist()
        assert all(rows == [1] * len(rows) for rows in fed.passes[1:])
        ragged += len({len(rows) for rows in fed.passes}) > 1
    assert ragged > 5
    assert (stopped > 5) == (kind is not None)


@pytest.mark.parametrize("state_layers", [(), (1, 2)])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_the_draft_may_have_another_dtype_than_the_target(
    target: torch.dtype, state_layers: tuple[int, ...]
) -> None:
    other = torch.bfloat16 if target is torch.float32 else torch.float32
    policy = AnyPlan((DRAFT, Proposer.NONE), 4, seed=2)
    engine, _ = engine_of(policy, state_layers=state_layers, dtypes=(target, other))
    requests = [engine.add(prompt(i, 9), SamplingParams(max_tokens=40)) for i in range(3)]
    sampled = engine.add(prompt(3, 9), SamplingParams(temperature=1.0, max_tokens=60))
    while engine.has_work:
        step(engine)
    assert sampled.accepted > 0
    model = engine.backend.target  # type: ignore[attr-defined]
    slack = 1e-4 if target is torch.float32 else 0.06
    for request in requests:
        ids, n = request.tokens, request.prompt_tokens
        blocks = list(range(-(-len(ids) // 4)))
        read = Runner(model, len(blocks), 4).read([ids], Spans([blocks], [0], [len(ids)]))
        logits = model.logits(read).float()[n - 1 : -1]
        chosen = logits[torch.arange(len(logits)), torch.tensor(request.output)]
        assert bool((logits.max(1).values - chosen <= slack).all())
