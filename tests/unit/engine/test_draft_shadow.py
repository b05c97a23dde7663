"""The draft model in the shadow: it guesses to be observed, nothing of it is verified."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, step, tiny_backend

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams
from parlay.engine.runner import Runner
from parlay.engine.sampling import probabilities
from parlay.engine.shadow import SHADOW_PASSES
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.policy import Stateless
from parlay.policies.types import (
    BatchView,
    Plan,
    Proposer,
    ShadowKind,
    StepOutcome,
    StopKind,
    StopRule,
)

DRAFT, NGRAM, NONE = Proposer.DRAFT_MODEL, Proposer.NGRAM, Proposer.NONE
VOCAB = 6
COUPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=60)


class Watching(Stateless):
    """Another policy's plan, with the draft model in the shadow of every row."""

    name = "watching"

    def __init__(self, inner: AnyPlan, shadow: bool = True) -> None:
        self.inner, self.shadow = inner, shadow

    def decide(self, view: BatchView) -> Plan:
        plan = self.inner.decide(view)
        plan.shadow[:] = self.shadow
        return plan


def plan_of(*proposers: Proposer, k: int = 3, shadow: bool = True) -> Watching:
    return Watching(AnyPlan(proposers, k, seed=3, fixed_k=True), shadow)


def engine_of(policy: Stateless, **options: Any) -> Engine:
    backend = tiny_backend(VOCAB, **options)
    return Engine(backend, LocalPlanner(policy), CONFIG)  # type: ignore[arg-type]


def drafts_in(outcome: StepOutcome) -> list[tuple[int, float, int, int]]:
    """Return (offered, matched, observed, kind) of the draft model's shadows."""
    s = outcome.shadow
    return [
        (int(s.offered_k[i]), float(s.matched[i]), int(s.observed[i]), int(s.kind[i]))
        for i in np.flatnonzero(s.proposer == DRAFT)
    ]


@pytest.mark.parametrize("state_layers", [(), (1, 2)])
@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=60), COUPLED])
def test_what_it_guesses_matches_as_often_as_what_it_drafts(
    sampling: SamplingParams, state_layers: tuple[int, ...]
) -> None:
    """Also where each step commits one token, so that a guess pends over several."""
    held: dict[int, tuple[int, int]] = {}
    engine = engine_of(plan_of(DRAFT, shadow=False), state_layers=state_layers)
    request = engine.add([1, 5, 2], sampling)
    while engine.has_work:
        at = request.output_tokens
        outcome = step(engine)
        held[at] = int(outcome.drafted_k[0]), int(outcome.accepted[0])
    expected_output = request.output

    engine = engine_of(plan_of(NONE, k=0), state_layers=state_layers)
    request, since, compared = engine.add([1, 5, 2], sampling), None, 0
    offered = engine.shadow.asks
    while engine.has_work:
        at = request.output_tokens
        if since is None and request.computed and offered([request], np.ones(1), np.ones(1, bool)):
            since = at
        outcome = step(engine)
        for count, matched, observed, kind in drafts_in(outcome):
            assert kind == ShadowKind.MATCH
            assert observed == min(matched + 1, count)
            if since in held and held[since][0] == count == SHADOW_PASSES:
                assert matched == held[since][1]
                compared += 1
            since = None
    assert request.output == expected_output
    assert compared > 3


def test_it_costs_nothing_but_its_passes() -> None:
    found = []
    for shadow in (False, True):
        engine = engine_of(plan_of(NONE, NGRAM, shadow=shadow))
        samplings = [SamplingParams(max_tokens=40), COUPLED]
        requests = [engine.add([1, 5, i], s) for i, s in enumerate(samplings)]
        outcomes = []
        while engine.has_work:
            outcomes.append(step(engine))
        assert all((o.draft_depth > 0) <= shadow for o in outcomes)
        assert sum(len(drafts_in(o)) for o in outcomes) > 10 * shadow or not shadow
        assert (sum(o.draft_depth for o in outcomes) > 0) == shadow
        assert not any((o.proposer == DRAFT).any() for o in outcomes)
        found.append(
            ([r.output for r in requests], [o.padded_tokens for o in outcomes],
             [o.drafted_k.tolist() for o in outcomes], [o.verified_k.tolist() for o in outcomes])
        )  # fmt: skip
    assert found[0] == found[1]


def law_after(runner: Runner, ids: list[int], sampling: SamplingParams) -> torch.Tensor:
    blocks = list(range(-(-len(ids) // 4)))
    hidden = Runner(runner.model, len(blocks), 4).read([ids], Spans([blocks], [0], [len(ids)]))
    return probabilities(runner.model.logits(hidden[-1:]), [sampling])[0]


@pytest.mark.parametrize("other", [NONE, NGRAM])
def test_under_rejection_sampling_the_overlap_of_the_laws_is_scored(other: Proposer) -> None:
    sampling = SamplingParams(temperature=0.7, max_tokens=40)
    engine = engine_of(plan_of(other))
    request = engine.add([1, 5, 2, 1, 5, 2], sampling)
    backend = engine.backend
    assert isinstance(backend, TorchBackend)
    assert backend.draft is not None
    propose = backend.propose

    def unmixed(*args: Any) -> Any:
        drafts = propose(*args)
        assert drafts.private is None or not drafts.private.row, "the n-gram drafts point masses"
        return drafts

    backend.propose = unmixed  # type: ignore[method-assign,assignment]
    scored = 0
    while engine.has_work:
        ids = list(request.tokens)
        outcome = step(engine)
        for offered, matched, observed, kind in drafts_in(outcome):
            p = law_after(backend.runner, ids, sampling)
            q = law_after(backend.draft.runner, ids, sampling)
            # The draft's head lacks the last token.
            overlap = float(torch.minimum(p[: len(q)], q).sum())
            assert (offered, observed, kind) == (1, 1, ShadowKind.OVERLAP)
            assert matched == pytest.approx(overlap, abs=1e-4)
            scored += 1
    assert scored > 10


def test_with_drafting_rows_beside_it_each_gets_its_own() -> None:
    """One batch: rows that draft, rows that are watched, rows of each way of sampling."""
    samplings = [SamplingParams(max_tokens=40), COUPLED, SamplingParams(1.0, max_tokens=40)]

    def outputs(policy: Stateless) -> tuple[list[Request], list[StepOutcome]]:
        engine = engine_of(policy)
        requests = [engine.add([1, 5, i % VOCAB], samplings[i % 3]) for i in range(9)]
        outcomes = []
        while engine.has_work:
            outcomes.append(step(engine))
        return requests, outcomes

    watched, outcomes = outputs(Watching(AnyPlan((NONE, NGRAM, DRAFT), 2, seed=1)))
    plain, _ = outputs(plan_of(NONE, k=0, shadow=False))
    for i, (a, b) in enumerate(zip(watched, plain, strict=True)):
        assert i % 3 == 2 or a.output == b.output
    kinds = {kind for o in outcomes for *_, kind in drafts_in(o)}
    assert kinds == {ShadowKind.MATCH, ShadowKind.OVERLAP}
    assert any((o.proposer == DRAFT).any() and drafts_in(o) for o in outcomes)
    for outcome in outcomes:
        drafted = np.asarray(np.isfinite(outcome.confidences).any(1))
        assert not drafted[outcome.proposer != DRAFT].any()


def test_a_guess_that_was_not_seen_to_its_end_says_so() -> None:
    engine = engine_of(plan_of(NONE, k=0))
    request = engine.add([1, 5, 2], SamplingParams(max_tokens=2))
    while engine.has_work:
        outcome = step(engine)
    assert request.output_tokens == 2
    assert [o for *_, o, _ in drafts_in(outcome)] in ([], [1])
    assert not engine.shadow._pending


@pytest.mark.parametrize("kind", [StopKind.SURVIVAL, StopKind.ENTROPY, StopKind.PROBABILITY])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0)])
def test_stop_rules_end_no_guess_that_is_only_watched(
    sampling: SamplingParams, kind: StopKind
) -> None:
    """Those that a rule lets go on hold more often than others."""
    rule = StopRule(kind, 0.0 if kind is StopKind.ENTROPY else 0.99)
    engine = engine_of(Watching(AnyPlan((NONE,), 0, stop_rule=rule)))
    request = engine.add([1, 5, 2], dataclasses.replace(sampling, max_tokens=60))
    offered = []
    while engine.has_work:
        room = request.remaining - 1
        offered += [k for k, *_ in drafts_in(step(engine)) if room > 20]
    assert len(offered) > 10
    assert set(offered) == {1 if sampling.temperature else SHADOW_PASSES}
