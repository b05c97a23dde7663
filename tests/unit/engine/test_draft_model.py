"""The draft model: each row its own depth, catching up after idleness, stop rules, confidences."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, step, tiny_backend

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.runner import Runner
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.policy import Stateless
from parlay.policies.types import BatchView, Plan, Proposer, StepOutcome, StopKind, StopRule

DRAFT = Proposer.DRAFT_MODEL
VOCAB = 40


class Script(Stateless):
    """Drafts script[step] tokens for every row with the draft model."""

    name = "script"

    def __init__(self, script: list[int]) -> None:
        self.script = script

    def decide(self, view: BatchView) -> Plan:
        rows, k = len(view), self.script[min(view.step_id, len(self.script) - 1)]
        return Plan(
            request_id=view.request_id,
            proposer=np.full(rows, DRAFT, np.uint8),
            k=np.full(rows, k, np.int16),
            shadow=np.zeros(rows, bool),
            propensity=np.ones(rows, np.float32),
            reason=np.zeros(rows, np.uint8),
            step_id=view.step_id,
        )


def outcomes(
    policy: Stateless, prompts: int = 1, tokens: int = 30, state_layers: tuple[int, ...] = ()
) -> list[StepOutcome]:
    backend = tiny_backend(VOCAB, state_layers=state_layers)
    engine = Engine(backend, LocalPlanner(policy), CONFIG)  # type: ignore[arg-type]
    for i in range(prompts):
        engine.add([1 + i, 5, 9, 2], SamplingParams(max_tokens=tokens))
    found = []
    while engine.has_work:
        found.append(step(engine))
    return found


@pytest.mark.parametrize("state_layers", [(), (1, 2)])
def test_after_idleness_it_drafts_what_it_would_have_drafted(state_layers: tuple[int, ...]) -> None:
    """At the same output position the guesses agree, whether or not it drafted before."""

    def confidences_by_position(script: list[int]) -> dict[int, list[float]]:
        position, found = 0, {}
        for outcome in outcomes(Script(script), state_layers=state_layers):
            if outcome.drafted_k[0]:
                found[position] = outcome.confidences[0, : outcome.drafted_k[0]].tolist()
            position += int(outcome.emitted[0])
        return found

    always = confidences_by_position([0] + [3] * 40)
    late = confidences_by_position([0] * 15 + [3] * 40)
    shared = set(always) & set(late)
    assert len(shared) > 5
    for position in shared:
        n = min(len(always[position]), len(late[position]))
        assert always[position][:n] == pytest.approx(late[position][:n], abs=1e-5)


def test_far_behind_it_begins_anew_a_window_before_the_end() -> None:
    config = dataclasses.replace(CONFIG, draft_window_tokens=8)
    backend = tiny_backend(VOCAB, config=config)
    engine = Engine(backend, LocalPlanner(Script([0, 0, 2] + [0] * 12 + [2])), config)
    request = engine.add([i % VOCAB for i in range(30)], SamplingParams(max_tokens=40))
    engine.step()
    for expected_start in (31 + 1 - 8, None):
        while not (outcome := step(engine)).drafted_k[0]:
            before = list(request.tokens)
        if expected_start is not None:
            assert request.draft_start == expected_start
        read = before[request.draft_start :]
        assert len(read) == 8
        assert outcome.confidences[0, 0] == pytest.approx(peak_after(backend, read), abs=1e-5)
        assert len(engine.scheduler.draft.tables[request.request_id]) <= 4


def test_each_token_is_read_beside_the_states_of_the_one_before() -> None:
    """Also accepted guesses, which were first read without; prompts in chunks; after preemption."""
    config = dataclasses.replace(CONFIG, token_budget=7, target_blocks=20, max_running=3)
    backend = tiny_backend(VOCAB, config=config, state_layers=(1, 2))
    policy = AnyPlan((DRAFT, Proposer.NGRAM, Proposer.NONE), 3, seed=6)
    engine = Engine(backend, LocalPlanner(policy), config)
    requests = [
        engine.add([(i * j) % VOCAB for j in range(1, 12)], SamplingParams(max_tokens=25))
        for i in (1, 2, 5)
    ]
    checked = 0
    while engine.has_work:
        before = {r.request_id: list(r.tokens) for r in requests}
        outcome = step(engine)
        for row in np.flatnonzero((outcome.proposer == DRAFT) & (outcome.drafted_k > 0)):
            ids = before[int(outcome.request_id[row])]
            expected = peak_beside_states(backend, ids)
            assert outcome.confidences[row, 0] == pytest.approx(expected, abs=1e-5)
            checked += 1
    assert checked > 15
    assert sum(r.preemptions for r in requests) > 0
    assert sum(r.accepted for r in requests) > 0


def peak_after(backend: TorchBackend, ids: list[int]) -> float:
    """Return the draft model's largest probability after ids that nothing comes before."""
    assert backend.draft is not None
    model = backend.draft.runner.model
    hidden = Runner(model, 4, 4).read([ids], Spans([[0, 1, 2, 3]], [0], [len(ids)]))
    return float(torch.softmax(model.logits(hidden)[-1].float(), -1).max())


def peak_beside_states(backend: TorchBackend, ids: list[int]) -> float:
    """Return the draft model's largest probability after ids, read whole beside their states."""
    assert backend.draft is not None
    blocks = list(range(16))
    target = Runner(backend.target, 16, 4, taps=(1, 2))
    target.read([ids[:-1]], Spans([blocks], [0], [len(ids) - 1]))
    spans = Spans([blocks], [0], [len(ids)])
    states = target.states_before(spans, [len(ids) - 1])
    assert not states[0].any()
    model = backend.draft.runner.model
    hidden = Runner(model, 16, 4).read([ids], spans, states)
    return float(torch.softmax(model.logits(hidden)[-1].float(), -1).max())


def test_passes_go_as_deep_as_the_deepest_row() -> None:
    for outcome in outcomes(AnyPlan((Proposer.NONE, DRAFT), 5, seed=4), prompts=6):
        deepest = int(outcome.drafted_k[outcome.proposer == DRAFT].max(initial=0))
        assert outcome.draft_depth == deepest
        assert np.all(outcome.drafted_k <= outcome.requested_k)


def test_confidences_are_there_for_what_was_drafted_and_only_there() -> None:
    for outcome in outcomes(AnyPlan((DRAFT,), 4, seed=2), prompts=3):
        places = np.arange(outcome.confidences.shape[1])
        drafted = places < outcome.drafted_k[:, None]
        assert np.all(np.isfinite(outcome.confidences) == drafted)
        assert np.all(outcome.confidences[drafted] > 0.0)


@pytest.mark.parametrize("kind", [StopKind.SURVIVAL, StopKind.PROBABILITY, StopKind.ENTROPY])
def test_stop_rules_stop_where_they_say(kind: StopKind) -> None:
    threshold = 0.25
    found = outcomes(AnyPlan((DRAFT,), 6, stop_rule=StopRule(kind, threshold), fixed_k=True), 4)
    full = outcomes(AnyPlan((DRAFT,), 6, fixed_k=True), 4)
    assert sum(int(o.drafted_k.sum()) for o in found) < sum(int(o.drafted_k.sum()) for o in full)
    for outcome in found:
        for row in np.flatnonzero(outcome.drafted_k):
            kept = outcome.confidences[row, : outcome.drafted_k[row]]
            if kind is StopKind.SURVIVAL:
                assert np.all(np.cumprod(kept) >= threshold)
                considered = outcome.confidences[row][np.isfinite(outcome.confidences[row])]
                assert len(considered) == len(kept) or np.prod(considered) < threshold
            if kind is StopKind.PROBABILITY:
                assert np.all(kept[:-1] >= threshold)
