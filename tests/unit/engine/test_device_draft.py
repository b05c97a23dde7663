"""Drafting as on a GPU: the same guesses, laws and branches, read back with the verdict."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.on_device import as_on_device, read_blindly
from tests.tiny import CONFIG, AnyPlan, fewer, tiny_backend, tiny_config
from tests.tiny_heads import headed_backend, rooted_config, rooted_weights
from tests.unit.engine.test_law import STOPS

from parlay.engine.medusa_heads import RootedHeads
from parlay.engine.models import Llama
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams
from parlay.engine.step import Engine
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.engine.transfer import Reading
from parlay.policies.types import (
    Array,
    BatchView,
    Plan,
    Proposer,
    StepOutcome,
    StopKind,
    StopRule,
)

ALL = (Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL, Proposer.MEDUSA)
VOCAB = 6
TOKENS = fewer(24, 2)
SAMPLINGS = [
    SamplingParams(max_tokens=TOKENS, logprobs=2), SamplingParams(0.9, seed=2, max_tokens=TOKENS),
    SamplingParams(1.0, max_tokens=TOKENS), SamplingParams(0.7, 4, 0.9, max_tokens=TOKENS),
]  # fmt: skip


class Priced(AnyPlan):
    """Any plan, observed by everybody, at prices at which every branch pays."""

    def decide(self, view: BatchView) -> Plan:
        plan = super().decide(view)
        plan.shadow[:] = True
        plan.survival = np.full((len(view), 4, self.k_max), 0.9, np.float32)
        plan.token_value_ms, plan.marginal_token_price_ms = 10.0, 0.0
        return plan


def run(backend: TorchBackend, policy: AnyPlan) -> tuple[list[Request], list[StepOutcome]]:
    engine = Engine(backend, LocalPlanner(policy), backend.config)
    requests = [engine.add([1, 5, 2, i % VOCAB, 5], SAMPLINGS[i % 4]) for i in range(8)]
    outcomes = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        outcomes.append(outcome)
    return requests, outcomes


@pytest.mark.parametrize(
    ("width", "overlap"), [(1, False), (1, True), (3, False)], ids=["chains", "overlapped", "trees"]
)
@pytest.mark.parametrize("stop", [StopRule(), *STOPS], ids=lambda s: s.kind.name.lower())
def test_a_step_does_what_it_does_on_a_cpu(stop: StopRule, width: int, overlap: bool) -> None:
    config = dataclasses.replace(CONFIG, tree_width=width, overlap=overlap)
    (ours, found), (theirs, expected) = (
        run(made(headed_backend(VOCAB, 1, config)), Priced(ALL, 4, stop_rule=stop))
        for made in (as_on_device, lambda backend: backend)
    )
    assert [r.output for r in ours] == [r.output for r in theirs]
    assert [r.logprobs for r in ours] == [r.logprobs for r in theirs]
    assert [r.accepted for r in ours] == [r.accepted for r in theirs]
    for one, other in zip(found, expected, strict=True):
        assert one.drafted_k.tolist() == other.drafted_k.tolist()
        assert one.draft_depth == other.draft_depth
        np.testing.assert_allclose(one.confidences, other.confidences, rtol=1e-5)
        np.testing.assert_allclose(one.shadow.matched, other.shadow.matched, rtol=1e-5)
    assert sum(o.draft_depth for o in found) > fewer(30, 3)


class Thrifty(Priced):
    """Drafts more than its budget has verified: who drafts has to be asked how sure it is."""

    def decide(self, view: BatchView) -> Plan:
        plan = super().decide(view)
        plan.budget_tokens = int(plan.k.sum()) // 2
        return plan


@pytest.mark.parametrize("proposer", [Proposer.DRAFT_MODEL, Proposer.MEDUSA])
@pytest.mark.parametrize("policy", [Priced, Thrifty])
def test_confidences_are_read_before_they_choose(
    policy: type[AnyPlan], proposer: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    arrays = Reading.arrays

    def counted(self: Reading) -> list[Array]:
        read.append(1)
        return arrays(self)

    monkeypatch.setattr(Reading, "arrays", counted)
    (ours, found), (theirs, expected) = (
        run(made(headed_backend(VOCAB, 1, CONFIG)), policy((proposer,), 4))
        for made in (as_on_device, lambda backend: backend)
    )
    assert [r.output for r in ours] == [r.output for r in theirs]
    for one, other in zip(found, expected, strict=True):
        assert one.verified_k.tolist() == other.verified_k.tolist()
        np.testing.assert_allclose(one.confidences, other.confidences, rtol=1e-5)
    drafting = sum(int(o.draft_depth > 0 or o.drafted_k.any()) for o in found)
    assert drafting > fewer(10, 2)
    if policy is Thrifty:
        assert len(read) > len(found) + drafting // 2
    else:
        assert len(read) <= len(found)


def test_nobody_waits_where_every_row_is_late() -> None:
    config = dataclasses.replace(CONFIG, draft_catch_up_tokens=1)
    ours, theirs = (
        run(made(tiny_backend(VOCAB, config=config)), AnyPlan((Proposer.DRAFT_MODEL,), 3))[0]
        for made in (as_on_device, lambda backend: backend)
    )
    assert [r.output for r in ours] == [r.output for r in theirs]


def without_data() -> TorchBackend:
    """Return a backend whose tensors have no values: whoever asks for one gets an error."""
    place = torch.device("meta")

    def model(layers: int, state_layers: tuple[int, ...] = ()) -> Llama:
        config = dataclasses.replace(tiny_config(VOCAB, layers), state_layers=state_layers)
        weights = {name: torch.empty(s) for name, s in config.tensor_shapes().items()}
        if state_layers:
            weights["state_proj.weight"] = torch.empty(16, 16 * len(state_layers))
        embedding = weights["model.embed_tokens.weight"]
        return Llama(config, weights, embedding, torch.float32, place)

    target, rooted = model(2), rooted_config(VOCAB)
    ids, weights = torch.arange(VOCAB - 1), rooted_weights(rooted)
    heads = RootedHeads(rooted, weights, target.embedding, torch.empty(VOCAB, 16), ids)
    heads.ids = ids
    draft = DraftModel(model(1, (1,)), torch.arange(VOCAB))
    backend = TorchBackend(target, draft, CONFIG, heads=heads)
    assert backend.draft is not None
    assert backend.medusa is not None
    # What tokens the entries of a law are is looked up once, when a backend is made.
    backend.draft.ids, heads.ids = draft.ids.to(place), ids.to(place)
    backend.medusa.on_device = True
    return backend


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("stop", [StopRule(), STOPS[1]], ids=["no rule", "a rule"])
def test_a_step_looks_at_the_device_as_often_whatever_its_rows(
    rows: int, stop: StopRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARLAY_ATTENTION", "sdpa")  # Triton's interpreter reads what it computes
    # Blind, everybody accepts nothing and is told token 0; that is all that a step asks.
    reading = read_blindly(monkeypatch)
    for proposer in (Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL, Proposer.MEDUSA):
        policy = AnyPlan((proposer,), 3, stop_rule=stop, fixed_k=True)
        engine = Engine(without_data(), LocalPlanner(policy), CONFIG)
        for i in range(rows):
            engine.add([1, 2, 1, 2, 1], SAMPLINGS[i % 4])
        engine.step()
        for _ in range(2):
            reading.made = 0
            outcome = engine.step()
            assert outcome is not None
            drafts = proposer in (Proposer.DRAFT_MODEL, Proposer.MEDUSA)
            assert reading.made >= 1
            if stop.kind is StopKind.NONE or not drafts:
                assert reading.made == 1
            else:  # once a place, and all that was guessed before it is verified
                assert reading.made <= 3 + int(outcome.drafted_k.max())
