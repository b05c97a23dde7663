"""Sampled output has the exact joint law whatever drafts it; coupled output never changes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tests.tiny import CONFIG, INTERPRETED, AnyPlan, fewer, tiny_backend

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.runner import Model, Runner
from parlay.engine.sampling import probabilities
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.types import Array, Proposer, StopKind, StopRule

VOCAB, LENGTH, DRAWS = 5, 3, fewer(3000, 20)
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
NONE, NGRAM, DRAFT = Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL
MIXES = {
    "none": (NONE,),
    "ngram": (NGRAM,),
    "draft": (DRAFT,),
    "mix": (NONE, NGRAM, DRAFT),
}
STOPS = [
    StopRule(StopKind.SURVIVAL, 0.3),
    StopRule(StopKind.ENTROPY, 0.4),
    StopRule(StopKind.PROBABILITY, 0.5),
]


def logits_after(model: Model, tokens: list[int]) -> torch.Tensor:
    hidden = Runner(model, 8, 16).read([tokens], Spans([list(range(8))], [0], [len(tokens)]))
    return model.logits(hidden)[-1:]


def exact_joint(params: SamplingParams, dtype: torch.dtype = torch.float32) -> Array:
    """Return P of every text of LENGTH tokens, by running the target over each of its prefixes."""
    model = tiny_backend(VOCAB, dtypes=(dtype, dtype)).target
    joint = np.ones((VOCAB,) * LENGTH)
    for length in range(LENGTH):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            law = probabilities(logits_after(model, PROMPT + list(prefix)), [params])[0].numpy()
            joint[prefix] *= law.reshape((VOCAB,) + (1,) * (LENGTH - length - 1))
    assert joint.sum() == pytest.approx(1.0)
    return joint


def counted(backend: TorchBackend, params: list[SamplingParams], policy: AnyPlan) -> Array:
    """Return how often each text came out, one request for each of `params`."""
    engine = Engine(backend, LocalPlanner(policy), backend.config)
    requests = [engine.add(PROMPT, p) for p in params]
    while engine.has_work:
        engine.step()
    counts = np.zeros((VOCAB,) * LENGTH)
    for request in requests:
        counts[tuple(request.output)] += 1
    return counts


def answers(backend: TorchBackend, policy: AnyPlan, temperature: float) -> list[list[int]]:
    """Return what twelve requests are answered, each with a seed where it is drawn."""
    engine = Engine(backend, LocalPlanner(policy), backend.config)
    params = [
        SamplingParams(
            temperature, top_p=0.95, seed=s if temperature else None, max_tokens=fewer(40, 3)
        )
        for s in range(12)
    ]
    requests = [engine.add([1 + s, 2, 3, 1 + s, 2], p) for s, p in enumerate(params)]
    while engine.has_work:
        engine.step()
    return [r.output for r in requests]


def draw(
    params: list[SamplingParams],
    policy: AnyPlan,
    seed: int,
    state_layers: tuple[int, ...] = (),
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> Array:
    backend = tiny_backend(VOCAB, seed, state_layers=state_layers, dtypes=dtypes)
    return counted(backend, params, policy)


def p_value(counts: Array, joint: Array) -> float:
    """Return chi-square's p, texts expected fewer than 5 times pooled."""
    expected = joint.ravel() * counts.sum()
    rare = expected < 5
    assert counts.ravel()[joint.ravel() == 0].sum() == 0, "a text came out that cannot"
    observed = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    pooled = np.append(expected[~rare], expected[rare].sum())
    keep = pooled > 0
    return float(chisquare(observed[keep], pooled[keep] * observed.sum() / pooled.sum()).pvalue)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.0, max_tokens=LENGTH), SamplingParams(0.7, 4, 0.9, max_tokens=LENGTH)],
    ids=["plain", "top-k-top-p"],
)
def test_rejection_sampling_has_the_exact_joint_law(mix: str, params: SamplingParams) -> None:
    counts = draw([params] * DRAWS, AnyPlan(MIXES[mix], 3), seed=11)
    assert p_value(counts, exact_joint(params)) > 1e-3


def test_a_draft_that_reads_states_does_not_bias() -> None:
    params = SamplingParams(1.0, max_tokens=LENGTH)
    counts = draw([params] * DRAWS, AnyPlan(MIXES["mix"], 3), seed=12, state_layers=(1, 2))
    assert p_value(counts, exact_joint(params)) > 1e-3


@pytest.mark.parametrize(
    ("target", "state_layers"),
    [(torch.float32, ()), (torch.float32, (1, 2)), (torch.bfloat16, (1,))],
)
def test_a_draft_in_another_dtype_than_the_target_does_not_bias(
    target: torch.dtype, state_layers: tuple[int, ...]
) -> None:
    other = torch.bfloat16 if target is torch.float32 else torch.float32
    params, policy = SamplingParams(0.9, max_tokens=LENGTH), AnyPlan(MIXES["draft"], 3)
    counts = draw([params] * (DRAWS // 2), policy, 8, state_layers, (target, other))
    assert p_value(counts, exact_joint(params, target)) > 1e-3


@pytest.mark.parametrize("stop", STOPS, ids=lambda s: s.kind.name.lower())
def test_stopping_a_draft_early_does_not_bias(stop: StopRule) -> None:
    params = SamplingParams(1.0, max_tokens=LENGTH)
    counts = draw([params] * DRAWS, AnyPlan((DRAFT,), 3, stop_rule=stop, fixed_k=True), seed=5)
    assert p_value(counts, exact_joint(params)) > 1e-3


@pytest.mark.parametrize("mix", ["none", "mix"])
def test_coupled_sampling_has_the_law_of_plain_sampling(mix: str) -> None:
    params = [SamplingParams(1.0, seed=s, max_tokens=LENGTH) for s in range(DRAWS)]
    counts = draw(params, AnyPlan(MIXES[mix], 3), seed=3)
    assert p_value(counts, exact_joint(SamplingParams(1.0))) > 1e-3


def test_the_test_of_laws_can_fail() -> None:
    params = SamplingParams(1.0, max_tokens=LENGTH)
    counts = draw([params] * DRAWS, AnyPlan((NONE,), 0), seed=11)
    assert p_value(counts, exact_joint(SamplingParams(0.4 if INTERPRETED else 1.3))) < 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_greedy_and_coupled_outputs_do_not_depend_on_speculation(temperature: float) -> None:
    def outputs(policy: AnyPlan, running: int) -> list[list[int]]:
        config = dataclasses.replace(CONFIG, max_running=running, target_blocks=100)
        return answers(tiny_backend(50, running, config), policy, temperature)

    plain = outputs(AnyPlan((NONE,), 0), running=1)
    assert len({tuple(o) for o in plain}) > 6
    for name, mix in MIXES.items():
        assert outputs(AnyPlan(mix, 8, seed=len(name)), running=12) == plain, name


@pytest.mark.parametrize("state_layers", [(), (1, 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nor_on_the_dtype_of_the_draft(temperature: float, state_layers: tuple[int, ...]) -> None:
    def outputs(policy: AnyPlan, draft: torch.dtype) -> tuple[list[list[int]], int]:
        dtypes = torch.float32, draft
        backend = tiny_backend(50, 4, state_layers=state_layers, dtypes=dtypes)
        engine = Engine(backend, LocalPlanner(policy), CONFIG)
        seeds = range(8)
        requests = [
            engine.add([1 + s, 2, 3], SamplingParams(temperature, seed=s, max_tokens=fewer(40, 3)))
            for s in seeds
        ]
        while engine.has_work:
            engine.step()
        return [r.output for r in requests], sum(r.accepted for r in requests)

    plain, _ = outputs(AnyPlan((NONE,), 0), torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        found, accepted = outputs(AnyPlan((DRAFT,), 5, seed=2), dtype)
        assert found == plain
        assert accepted > 0
