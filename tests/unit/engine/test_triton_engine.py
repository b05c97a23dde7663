"""An engine whose models attend by Triton kernels says what one on SDPA says without drafts."""

from __future__ import annotations

import dataclasses

import pytest
from tests.tiny import CONFIG
from tests.tiny_heads import headed_backend
from tests.triton_cases import INTERPRETED
from tests.unit.engine.test_branches import Priced

from parlay.engine.attention.triton import TritonAttention
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.policies.types import Proposer

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: not on a CPU")
NONE, NGRAM, DRAFT, MEDUSA = Proposer
TIGHT = dataclasses.replace(
    CONFIG, tree_width=3, max_running=3, token_budget=24, target_blocks=9, draft_blocks=14
)
"""Chunks of prompts beside drafts, trees, and too few blocks for all."""


def decode(
    monkeypatch: pytest.MonkeyPatch, kernels: str, config: EngineConfig, policy: Priced, heat: float
) -> list[Request]:
    monkeypatch.setenv("PARLAY_ATTENTION", kernels)
    backend = headed_backend(20, 1, config)
    assert isinstance(backend.runner.cache, TritonAttention) == (kernels == "triton")
    engine = Engine(backend, LocalPlanner(policy), config)
    start = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    requests = [
        engine.add([*start, 5 + s], SamplingParams(heat, seed=s if heat else None, max_tokens=12))
        for s in range(4)
    ]
    while engine.has_work:
        engine.step()
    return requests


@pytest.mark.parametrize("heat", [0.0, 0.8], ids=["greedy", "coupled"])
def test_it_says_what_plain_decoding_says(monkeypatch: pytest.MonkeyPatch, heat: float) -> None:
    plain = decode(monkeypatch, "sdpa", CONFIG, Priced((NONE,), 1), heat)
    policy = Priced((NONE, NGRAM, DRAFT, MEDUSA), 5)
    drafted = decode(monkeypatch, "triton", TIGHT, policy, heat)
    assert [r.output for r in drafted] == [r.output for r in plain]
    assert sum(r.preemptions for r in drafted) > 0, "the blocks sufficed"
    assert sum(r.cached_tokens for r in drafted) > 0, "nothing was found again"
