"""Medusa heads in the engine: lossless, from the right states, stopping where they should."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, step
from tests.tiny_heads import HEADS, headed_backend
from tests.unit.engine.test_law import (
    DRAWS,
    LENGTH,
    STOPS,
    VOCAB,
    answers,
    counted,
    exact_joint,
    p_value,
)

from parlay.engine.medusa_heads import children
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.runner import Runner
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.verify import accept, places_of
from parlay.policies.types import (
    Array,
    BatchView,
    Plan,
    Proposer,
    StepOutcome,
    StopKind,
    StopRule,
)

MEDUSA = Proposer.MEDUSA
ALL = (Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL, MEDUSA)


def draw(params: list[SamplingParams], policy: AnyPlan, seed: int, plain: bool = False) -> Array:
    return counted(headed_backend(VOCAB, seed, plain=plain), params, policy)


@pytest.mark.parametrize("plain", [False, True], ids=["rooted", "plain"])
@pytest.mark.parametrize("proposers", [(MEDUSA,), ALL], ids=["medusa", "all"])
def test_rejection_sampling_has_the_exact_joint_law(
    proposers: tuple[Proposer, ...], plain: bool
) -> None:
    params = SamplingParams(0.7, 4, 0.9, max_tokens=LENGTH)
    counts = draw([params] * DRAWS, AnyPlan(proposers, 3), seed=11, plain=plain)
    assert p_value(counts, exact_joint(params)) > 1e-3


@pytest.mark.parametrize("stop", STOPS, ids=lambda s: s.kind.name.lower())
def test_stopping_early_does_not_bias(stop: StopRule) -> None:
    params = SamplingParams(1.0, max_tokens=LENGTH)
    policy = AnyPlan((MEDUSA,), 3, stop_rule=stop, fixed_k=True)
    assert p_value(draw([params] * DRAWS, policy, seed=5), exact_joint(params)) > 1e-3


def test_coupled_sampling_has_the_law_of_plain_sampling() -> None:
    params = [SamplingParams(1.0, seed=s, max_tokens=LENGTH) for s in range(DRAWS)]
    counts = draw(params, AnyPlan(ALL, 3), seed=3)
    assert p_value(counts, exact_joint(SamplingParams(1.0))) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("plain", [False, True], ids=["rooted", "plain"])
def test_greedy_and_coupled_outputs_do_not_depend_on_heads(temperature: float, plain: bool) -> None:
    def outputs(policy: AnyPlan, running: int) -> list[list[int]]:
        config = dataclasses.replace(CONFIG, max_running=running, target_blocks=100)
        return answers(headed_backend(50, running, config, plain), policy, temperature)

    without = outputs(AnyPlan((Proposer.NONE,), 0), running=1)
    assert len({tuple(o) for o in without}) > 6
    for proposers in ((MEDUSA,), ALL):
        assert outputs(AnyPlan(proposers, 8, seed=2), running=12) == without


def guesses_from_scratch(backend: TorchBackend, ids: list[int]) -> tuple[list[int], list[float]]:
    """Return what the heads guess behind ids, the target reading all but the last of them anew."""
    assert backend.medusa is not None
    heads, blocks = backend.medusa.heads, [list(range(16))]
    target = Runner(backend.target, 16, 4, heads.state_layers)
    known = len(ids) - 1
    target.read([ids[:-1]], Spans(blocks, [0], [known]))
    states = target.states_before(Spans(blocks, [known], [1]), [known])
    assert states.any()
    found, probs = children(heads, states, torch.tensor(ids[-1:]), 2)
    return found[0, :, 0].tolist(), probs[0, :, 0].tolist()


@pytest.mark.parametrize("plain", [False, True], ids=["rooted", "plain"])
def test_heads_read_the_state_that_made_the_last_token(plain: bool) -> None:
    """Also behind accepted guesses of anyone, prompts in chunks and preemption."""
    config = dataclasses.replace(CONFIG, token_budget=7, target_blocks=20, max_running=3)
    backend = headed_backend(40, config=config, plain=plain)
    engine = Engine(backend, LocalPlanner(AnyPlan(ALL, 3, seed=6)), config)
    requests = [
        engine.add([(i * j) % 40 for j in range(1, 12)], SamplingParams(max_tokens=25))
        for i in (1, 2, 5, 7, 9)
    ]
    checked = 0
    while engine.has_work:
        before = {r.request_id: list(r.tokens) for r in requests}
        outcome = step(engine)
        for row in np.flatnonzero((outcome.proposer == MEDUSA) & (outcome.drafted_k > 0)):
            k = int(outcome.drafted_k[row])
            _, probs = guesses_from_scratch(backend, before[int(outcome.request_id[row])])
            assert outcome.confidences[row, :k] == pytest.approx(probs[:k], abs=1e-5)
            checked += 1
    assert checked > 15
    assert sum(r.preemptions for r in requests) > 0
    assert sum(r.accepted for r in requests) > 0


def outcomes(policy: AnyPlan, prompts: int = 3) -> list[StepOutcome]:
    engine = Engine(headed_backend(40), LocalPlanner(policy), CONFIG)
    for i in range(prompts):
        engine.add([1 + i, 5, 9, 2], SamplingParams(max_tokens=30))
    found = []
    while engine.has_work:
        found.append(step(engine))
    return found


def test_no_more_is_guessed_than_there_are_heads_and_what_it_took_is_told() -> None:
    found = outcomes(AnyPlan((MEDUSA,), 9, fixed_k=True))
    assert max(int(o.drafted_k.max()) for o in found) == HEADS
    for outcome in found:
        assert (outcome.draft_ms[MEDUSA] > 0.0) == bool(outcome.drafted_k.any())
        assert outcome.draft_depth == 0


def test_confidences_are_there_for_what_was_guessed_and_only_there() -> None:
    for outcome in outcomes(AnyPlan((MEDUSA,), 4, seed=2)):
        places = np.arange(outcome.confidences.shape[1])
        assert np.all(np.isfinite(outcome.confidences) == (places < outcome.drafted_k[:, None]))


@pytest.mark.parametrize("kind", [StopKind.SURVIVAL, StopKind.PROBABILITY, StopKind.ENTROPY])
def test_stop_rules_stop_where_they_say(kind: StopKind) -> None:
    threshold = 0.5 if kind is StopKind.ENTROPY else 0.25
    found = outcomes(AnyPlan((MEDUSA,), 4, stop_rule=StopRule(kind, threshold), fixed_k=True))
    full = outcomes(AnyPlan((MEDUSA,), 4, fixed_k=True))
    assert sum(int(o.drafted_k.sum()) for o in found) < sum(int(o.drafted_k.sum()) for o in full)
    for outcome in found:
        for row in np.flatnonzero(outcome.drafted_k):
            kept = outcome.confidences[row, : outcome.drafted_k[row]]
            if kind is StopKind.SURVIVAL:
                assert np.all(np.cumprod(kept) >= threshold)
            if kind is StopKind.PROBABILITY:
                assert np.all(kept[:-1] >= threshold)


@pytest.mark.parametrize("kind", [None, StopKind.SURVIVAL, StopKind.PROBABILITY, StopKind.ENTROPY])
def test_a_row_that_stops_costs_no_further_rows(kind: StopKind | None) -> None:
    limits = {StopKind.SURVIVAL: 0.25, StopKind.ENTROPY: 0.4, StopKind.PROBABILITY: 0.6}
    rule = StopRule(kind, limits[kind]) if kind else None
    policy = AnyPlan((MEDUSA, Proposer.NONE), 4, seed=1, stop_rule=rule)
    engine = Engine(headed_backend(40), LocalPlanner(policy), CONFIG)
    assert isinstance(engine.backend, TorchBackend)
    assert engine.backend.medusa is not None
    heads, rows = engine.backend.medusa.heads, list[int]()
    run = heads.step

    def counted(place: int, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows.append(len(x))
        return run(place, x, tokens)

    heads.step = counted  # type: ignore[method-assign,assignment]
    engine.shadow.asks_heads = lambda *_: np.zeros(0, np.int32)  # type: ignore[method-assign]
    for i in range(6):
        engine.add([1 + i, 5, 9, 2], SamplingParams(max_tokens=30))
    ragged = stopped = 0
    while engine.has_work:
        rows.clear()
        outcome = step(engine)
        # A row is read for the place where it stops, and for none behind it.
        most = outcome.drafted_k + (kind in (StopKind.SURVIVAL, StopKind.ENTROPY))
        considered = np.isfinite(outcome.confidences)
        assert np.all(considered.sum(1) == np.minimum(most, outcome.requested_k))
        assert rows == considered.sum(0)[considered.any(0)].tolist()
        stopped += int((outcome.drafted_k < outcome.requested_k).sum())
        ragged += len(set(rows)) > 1
    assert ragged > 5
    assert (stopped > 5) == (kind is not None)


class Believing(AnyPlan):
    """Plans under which one proposer's confidences mean what slopes and offsets [2, K] say."""

    def __init__(self, proposer: Proposer, lines: list[list[float]]) -> None:
        super().__init__((MEDUSA,), 4, stop_rule=StopRule(StopKind.SURVIVAL, 0.5), fixed_k=True)
        at_their_word = np.array([[1.0], [0.0]], np.float32)
        self.calibration = np.tile(at_their_word, (len(Proposer), 1, len(lines[0])))
        self.calibration[proposer] = lines

    def decide(self, view: BatchView) -> Plan:
        lines = self.calibration[:, :, 0] if self.calibration.shape[2] == 1 else self.calibration
        return dataclasses.replace(super().decide(view), calibration=lines)


def test_stop_rules_go_by_what_the_plan_thinks_of_heads_at_each_place() -> None:
    def drafted(proposer: Proposer, lines: list[list[float]]) -> list[list[int]]:
        found = outcomes(Believing(proposer, lines))
        return [o.drafted_k[o.requested_k == 4].tolist() for o in found]

    plain = drafted(Proposer.NGRAM, [[1.0], [0.0]])
    assert {k for step in plain for k in step} > {0, 1}
    assert drafted(Proposer.DRAFT_MODEL, [[1.0], [-20.0]]) == plain
    assert {k for step in drafted(MEDUSA, [[1.0], [-20.0]]) for k in step} == {0}
    assert {k for step in drafted(MEDUSA, [[1.0], [20.0]]) for k in step} == {4}
    deep = drafted(MEDUSA, [[1.0, 1.0, 1.0], [20.0, 20.0, -20.0]])
    assert {k for step in deep for k in step} == {2}
    assert {k for step in drafted(MEDUSA, [[1.0, 1.0], [-20.0, 20.0]]) for k in step} == {0}
    last_goes_on = drafted(MEDUSA, [[0.0, 0.0], [1.1, 1.1]])  # sigmoid(1.1) = .75
    assert {k for step in last_goes_on for k in step} == {2}


def test_where_heads_have_the_targets_law_coupled_guesses_are_its_tokens() -> None:
    backend = headed_backend(9, plain=True)
    assert backend.medusa is not None
    rng = torch.Generator().manual_seed(4)
    held = 0
    for seed in range(40):
        sampling = SamplingParams(1.0, top_p=0.95, seed=seed)
        request = Request(1, [1, 2, 3], 3, sampling, SpeculationParams(), None)
        logits = torch.randn(3, 9, generator=rng)
        choose = backend.medusa._choose
        guesses = [int(choose(logits[j : j + 1], [request], j)[0][0]) for j in (0, 1)]
        places = places_of(np.array([0]), np.array([guesses]), np.array([2]))
        held += int(accept(logits, [request], places, None, backend.seed)[0][0])
    assert held == 80


def test_an_engine_without_heads_does_not_offer_them() -> None:
    backend = headed_backend()
    assert backend.limits().proposer_mask >> MEDUSA & 1
    assert backend.draft is not None
    bare = TorchBackend(backend.target, None, CONFIG)
    assert not bare.limits().proposer_mask >> MEDUSA & 1
