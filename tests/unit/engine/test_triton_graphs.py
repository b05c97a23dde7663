"""Graphs over the Triton kernels' own static passes, in the interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, tiny_backend, tiny_llama
from tests.triton_cases import INTERPRETED
from tests.unit.engine.test_graphs import TABLES, graphed, read_both, windowed

from parlay.engine.attention.triton import TritonAttention
from parlay.engine.graphs import StaticAttention
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.tree import trees_of
from parlay.policies.types import Proposer

VOCAB = 6
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: not on a CPU")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("parlay.engine.models.choose_attention", lambda device: TritonAttention)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("local", [False, True], ids=["global", "windows"])
def test_a_padded_tree_pass_is_what_it_is_without(local: bool) -> None:
    model = windowed() if local else tiny_llama(VOCAB, 2, 3)
    rng = np.random.default_rng(3)
    known = [rng.integers(0, VOCAB, n).tolist() for n in (11, 3, 7)]
    fed = [rng.integers(0, VOCAB, n).tolist() for n in (4, 1, 6)]
    trees = trees_of([[1, 2, 3], [], [1, 2, 3, 4, 5]], [[-1, -1, 0], [], [-1, 0, -1, 2, 2]])
    spans = Spans(TABLES, [11, 3, 7], [4, 1, 6], trees)
    runner, _, _ = read_both(model, fed, spans, known, (1, 2))
    assert isinstance(runner.cache, StaticAttention)
    assert runner.graphs is not None
    assert runner.graphs.stats.replayed == 1


@pytest.mark.slow
def test_the_engine_says_the_same() -> None:
    outputs = []
    for graphs in (True, False):
        config = dataclasses.replace(CONFIG, max_running=2, context_tokens=16)
        backend = tiny_backend(VOCAB, state_layers=(1, 2), config=config)
        if graphs:
            graphed(backend)
        policy = AnyPlan((Proposer.DRAFT_MODEL, Proposer.NONE), 3)
        engine = Engine(backend, LocalPlanner(policy), backend.config)
        requests = [
            engine.add([1, 5, i], SamplingParams(t, seed=i if t else None, max_tokens=4))
            for i, t in enumerate((0.0, 0.9))
        ]
        while engine.has_work:
            engine.step()
        outputs.append([r.output for r in requests])
        assert all(s.replayed for s in backend.graph_stats().values())
    assert outputs[0] == outputs[1]
