"""Medusa heads in the shadow: scored on what was committed, nothing of them is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from tests.tiny import CONFIG, AnyPlan, fewer, step
from tests.tiny_heads import HEADS, headed_backend
from tests.unit.engine.test_law import logits_after

from parlay.engine import shadow as scoring
from parlay.engine.backend import Drafts
from parlay.engine.branches import Branch
from parlay.engine.planner import LocalPlanner
from parlay.engine.proposers.medusa import HeadsRun
from parlay.engine.proposers.unread import take
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.sampling import probabilities
from parlay.engine.shadow import HEADS_STEPS
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.types import (
    BatchView,
    Plan,
    Proposer,
    ShadowKind,
    StepOutcome,
    StopKind,
    StopRule,
)

MEDUSA, DRAFT, NGRAM, NONE = (
    Proposer.MEDUSA, Proposer.DRAFT_MODEL, Proposer.NGRAM, Proposer.NONE,
)  # fmt: skip
VOCAB = 6
COUPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=60)


@pytest.fixture
def _each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "HEADS_STEPS", 1)


def engine_of(policy: AnyPlan, seed: int = 0) -> Engine:
    return Engine(headed_backend(VOCAB, seed), LocalPlanner(policy), CONFIG)


def scored(outcome: StepOutcome) -> list[tuple[int, int, int, int]]:
    """Return (request, offered, matched, observed) of the heads' shadows."""
    s = outcome.shadow
    mine = np.flatnonzero(s.proposer == MEDUSA)
    assert np.all(s.kind[mine] == ShadowKind.MATCH)
    columns = s.request_id, s.offered_k, s.matched, s.observed
    return list(zip(*(c[mine].astype(int).tolist() for c in columns), strict=True))


@pytest.mark.usefixtures("_each_step")
@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=60), COUPLED])
def test_what_they_guess_matches_as_often_as_what_they_draft(sampling: SamplingParams) -> None:
    """Also where each step commits one token, so that a guess pends over several."""
    held: dict[int, int] = {}
    engine = engine_of(AnyPlan((MEDUSA,), HEADS, fixed_k=True))
    request = engine.add([1, 5, 2], sampling)
    while engine.has_work:
        at = request.output_tokens
        outcome = step(engine)
        assert not scored(outcome), "what is verified is not scored again"
        if outcome.drafted_k[0] == HEADS:
            held[at] = int(outcome.accepted[0])
    expected = request.output

    engine = engine_of(AnyPlan((NONE,), 0))
    request, since, compared = engine.add([1, 5, 2], sampling), None, 0
    while engine.has_work:
        at = request.output_tokens
        if since is None and at:
            since = at
        outcome = step(engine)
        for _, offered, matched, observed in scored(outcome):
            assert observed == min(matched + 1, offered)
            if since in held and offered == HEADS:
                assert matched == held[since]
                compared += 1
            since = None
    assert request.output == expected
    assert compared > 5


def guesses_of(engine: Engine) -> list[dict[int, list[int]]]:
    """Return a list that gets what the heads guess only to be watched, by row, each step."""
    taken, watch = list[dict[int, list[int]]](), engine.shadow.watch

    def spy(
        requests: Sequence[Request], guesses: Mapping[int, list[int]], proposer: Proposer = DRAFT
    ) -> None:
        if proposer is MEDUSA:
            taken.append(dict(guesses))
        watch(requests, guesses, proposer)

    engine.shadow.watch = spy  # type: ignore[method-assign]
    return taken


@pytest.mark.usefixtures("_each_step")
def test_under_rejection_sampling_a_match_is_as_likely_as_acceptance() -> None:
    """A point mass is accepted with the target's probability of it, and is drawn as often."""
    engine = engine_of(AnyPlan((NONE,), 0))
    taken, backend = guesses_of(engine), engine.backend
    assert isinstance(backend, TorchBackend)
    sampling = SamplingParams(1.0, max_tokens=fewer(80, 4))
    requests = [engine.add([1, 5, i], sampling) for i in range(5)]
    hits = reported = 0
    expected = spread = 0.0
    while engine.has_work:
        running = [(r, list(r.tokens)) for r in requests if not r.finished]
        outcome = step(engine)
        reported += sum(matched > 0 for _, _, matched, _ in scored(outcome))
        for row, guess in taken[-1].items():
            request, ids = running[row]
            p = probabilities(logits_after(backend.target, ids), [sampling])[0]
            chance = float(p[guess[0]])
            hits += request.tokens[len(ids)] == guess[0]
            expected, spread = expected + chance, spread + chance * (1.0 - chance)
    assert hits == reported > 0
    assert spread > fewer(20, 4)
    assert abs(hits - expected) < 4.0 * spread**0.5


def test_they_cost_nothing_but_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for each in (10**9, 1):
        monkeypatch.setattr(scoring, "HEADS_STEPS", each)
        engine = engine_of(AnyPlan((NONE, NGRAM, DRAFT), 3, seed=3))
        samplings = [SamplingParams(max_tokens=40), COUPLED]
        requests = [engine.add([1, 5, i], s) for i, s in enumerate(samplings)]
        outcomes = []
        while engine.has_work:
            outcomes.append(step(engine))
        assert (sum(len(scored(o)) for o in outcomes) > 10) == (each == 1)
        assert any(o.draft_ms[MEDUSA] > 0.0 for o in outcomes) == (each == 1)
        assert not any((o.proposer == MEDUSA).any() for o in outcomes)
        found.append(
            ([r.output for r in requests], [o.padded_tokens for o in outcomes],
             [o.drafted_k.tolist() for o in outcomes], [o.verified_k.tolist() for o in outcomes],
             [np.isfinite(o.confidences).tolist() for o in outcomes])
        )  # fmt: skip
    assert found[0] == found[1]


def test_where_nothing_drafts_with_them_they_run_now_and_then() -> None:
    engine = engine_of(AnyPlan((NONE,), 0))
    for i in range(3):
        engine.add([1, 5, i], SamplingParams(max_tokens=70))
    ran = []
    while engine.has_work:
        outcome = step(engine)
        if outcome.draft_ms[MEDUSA] > 0.0:
            ran.append(outcome.step_id)
    assert ran == [HEADS_STEPS, 2 * HEADS_STEPS, 3 * HEADS_STEPS, 4 * HEADS_STEPS]


class Half(AnyPlan):
    """Heads draft for one request, nothing for the others."""

    def decide(self, view: BatchView) -> Plan:
        plan = super().decide(view)
        plan.k[view.request_id != 1] = 0
        return plan


def test_beside_rows_that_they_draft_for_they_guess_for_all_that_allow_them() -> None:
    engine = engine_of(Half((MEDUSA,), 3, fixed_k=True))
    no_heads = SpeculationParams(1 << NONE | 1 << NGRAM)
    for i, may in enumerate((None, None, no_heads)):
        engine.add([1, 5, i], SamplingParams(max_tokens=40), may)
    first: set[int] = set()
    while engine.has_work:
        outcome = step(engine)
        first.update(request for request, *_ in scored(outcome))
        assert not (outcome.drafted_k[outcome.request_id != 1]).any()
        assert not np.isfinite(outcome.confidences[outcome.request_id != 1]).any()
    assert first == {2}
    assert not engine.shadow._pending


@pytest.mark.usefixtures("_each_step")
@pytest.mark.parametrize("kind", [StopKind.SURVIVAL, StopKind.ENTROPY, StopKind.PROBABILITY])
def test_stop_rules_end_no_guess_that_is_only_watched(kind: StopKind) -> None:
    """Those that a rule lets go on hold more often than others."""
    rule = StopRule(kind, 0.0 if kind is StopKind.ENTROPY else 0.99)
    engine = engine_of(AnyPlan((NONE,), 0, stop_rule=rule))
    request = engine.add([1, 5, 2], SamplingParams(max_tokens=60))
    offered = []
    while engine.has_work:
        room = request.remaining - 1
        outcome = step(engine)
        offered += [(k, room) for _, k, _, _ in scored(outcome)]
    assert len(offered) > 10
    assert all(k == HEADS for k, room in offered if room > 20)


def test_what_stands_beside_a_watched_guess_is_dropped() -> None:
    beside = {4: [Branch(0, [1], 0.5)], 7: [Branch(0, [2], 0.5)]}
    tokens = np.array([[5, 6], [-1, -1], [7, -1]])
    run = HeadsRun(np.array([2, 0, 1]), tokens, np.ones((3, 2)), beside)
    tokens, confidences = np.full((8, 2), -1), np.full((8, 2), np.nan)
    drafts = Drafts(np.zeros(8, np.int32), tokens, confidences, np.full(8, -1))
    watching = np.array([0, 0, 0, 0, 2, 2, 0, 0], np.int32)
    take(drafts, run, np.array([4, 5, 7]), watching, drafts.heads_watched)
    assert drafts.heads_watched == {4: [5, 6]}
    assert drafts.count.tolist() == [0] * 7 + [1]
    assert drafts.tokens.tolist() == [[-1, -1]] * 7 + [[7, -1]]
    assert drafts.branches == {7: beside[7]}
