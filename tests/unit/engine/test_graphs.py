"""Graphs by bucket: the same tokens as without, padding that touches nothing, sizes and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.on_device import as_on_device
from tests.static_attention import StaticAttention
from tests.tiny import (
    CONFIG,
    AnyPlan,
    fewer,
    tiny_backend,
    tiny_config,
    tiny_llama,
    tiny_weights,
)
from tests.tiny_heads import headed_backend
from tests.unit.engine.test_device_draft import Priced, run
from torch import Tensor

from parlay.engine.graph_capture import Capture, EagerCapture, Recording, Work
from parlay.engine.graphs import EDGES, Graphs, edges_up_to
from parlay.engine.graphs import StaticAttention as Protocol
from parlay.engine.models import Llama
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.runner import Runner, chosen, flat
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.traits import LLAMA, Local
from parlay.engine.tree import trees_of
from parlay.policies.types import Proposer, StopKind, StopRule

ALL = (Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL, Proposer.MEDUSA)
VOCAB = 6
TABLES = [[3, 9, 1, 7, 13], [2, 5, 4, 11, 14], [8, 6, 10, 12, 15]]


@pytest.fixture(autouse=True)
def static(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.engine.models.choose_attention", lambda device: StaticAttention)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Counted(EagerCapture):
    """Keeps what was recorded, and how often each recording ran."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def record(self, work: Work) -> Recording:
        made, index = super().record(work), len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[index] += 1
            made.replay()

        return Recording(made.results, replay)


def graphed(backend: TorchBackend, capture: Capture | None = None) -> TorchBackend:
    """Let a backend draft as on a GPU and replay what it can."""
    as_on_device(backend).use_graphs(lambda device: capture or EagerCapture())
    return backend


@pytest.mark.parametrize("width", [1, 3], ids=["chains", "trees"])
def test_the_engine_says_the_same_with_graphs(width: int) -> None:
    config = dataclasses.replace(CONFIG, tree_width=width, max_running=5)
    policy = Priced(ALL, 4)
    ours, outcomes = run(graphed(backend := headed_backend(VOCAB, 1, config)), policy)
    # Plans are fitted to the edges: with others they would be others.
    other, limits = headed_backend(VOCAB, 1, config), backend.limits()
    other.limits = lambda: limits  # type: ignore[method-assign]
    theirs, plain = run(other, Priced(ALL, 4))
    assert [r.output for r in ours] == [r.output for r in theirs]
    assert [o.drafted_k.tolist() for o in outcomes] == [o.drafted_k.tolist() for o in plain]
    stats = backend.graph_stats()
    assert list(stats) == ["target", "draft", "heads"]
    assert not any(s.eager for s in stats.values())
    assert stats["target"].replayed == len(outcomes)
    assert all(0 < fewer(2, 2) * s.recorded < s.replayed for s in stats.values())
    # What a step is told to have cost is what it was padded to.
    edges = backend.limits().bucket_edges
    assert all(o.padded_tokens in edges for o in outcomes)
    fed = [p.padded_tokens for p in plain]
    assert stats["target"].padding_tokens == sum(o.padded_tokens for o in outcomes) - sum(fed)


def test_edges_are_published_and_reach_what_a_step_can_have() -> None:
    config = dataclasses.replace(CONFIG, max_running=2)
    backend = tiny_backend(VOCAB, config=config)
    assert backend.limits().bucket_edges == ()
    assert backend.graph_stats() == {}
    graphed(backend)
    assert backend.limits().bucket_edges == (1, 2, 4, 8, 16, 24, 32, 48)  # 2 rows of 16 drafts
    assert edges_up_to(1) == (1,)
    assert edges_up_to(10**6) == EDGES
    assert list(EDGES) == sorted(set(EDGES))
    engine = Engine(backend, LocalPlanner(AnyPlan((Proposer.NGRAM,), 2)), config)
    seen: list[list[int]] = []
    decide = engine.planner.plan

    def plan(view):  # type: ignore[no-untyped-def]
        seen.append(view.bucket_edges.tolist())
        return decide(view)

    engine.planner.plan = plan  # type: ignore[method-assign]
    engine.add([1, 2, 3])
    engine.step()
    assert seen == [list(backend.limits().bucket_edges)]


def test_without_drafts_a_step_is_one_replay_of_the_plain_graph() -> None:
    capture = Counted()
    backend = graphed(headed_backend(VOCAB, 1), capture)
    engine = Engine(backend, LocalPlanner(AnyPlan((Proposer.DRAFT_MODEL,), 0)), CONFIG)
    for _ in range(3):
        engine.add([1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    before = sum(capture.replays)
    for step in range(1, 10):
        outcome = engine.step()
        assert outcome is not None
        assert sum(capture.replays) == before + step
        assert outcome.padded_tokens == 4  # three rows
    assert backend.graph_stats()["draft"].replayed == 0
    assert backend.graph_stats()["heads"].replayed == 0


def read_both(
    model: Llama, fed: list[list[int]], spans: Spans, known: list[list[int]], taps: tuple[int, ...]
) -> tuple[Runner, Tensor, Tensor]:
    """Read `fed` behind `known` by a graph and without; compare caches, logits and kept states."""
    ours, theirs = (Runner(model, 16, 4, taps) for _ in range(2))
    assert ours.use_graphs(32, 20, EagerCapture())
    for runner in (ours, theirs):
        starts = [0] * len(known)
        runner.read(known, Spans(spans.tables, starts, [len(k) for k in known]))
    replayed, plain = (r.forward(flat(fed), spans) for r in (ours, theirs))
    torch.testing.assert_close(replayed.logits, plain.logits)
    assert torch.equal(replayed.after[0], plain.logits.argmax(-1))
    torch.testing.assert_close(ours.cache.cache.pool, theirs.cache.cache.pool)
    torch.testing.assert_close(ours._kept[:-1], theirs._kept[:-1])
    return ours, replayed.logits, plain.logits


def windowed() -> Llama:
    local = Local(window=5, rope_theta=500.0, layers=(True, False))
    config = dataclasses.replace(
        tiny_config(VOCAB, 2), traits=dataclasses.replace(LLAMA, local=local)
    )
    weights = tiny_weights(config.tensor_shapes(), torch.Generator().manual_seed(4))
    embedding = weights["model.embed_tokens.weight"]
    return Llama(config, weights, embedding, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("bent", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("local", [False, True], ids=["global", "windows"])
def test_padding_reads_and_writes_nothing(bent: bool, local: bool) -> None:
    model = windowed() if local else tiny_llama(VOCAB, 2, 3)
    rng = np.random.default_rng(3)
    known = [rng.integers(0, VOCAB, n).tolist() for n in (11, 3, 7)]
    lengths = [4, 1, 6]
    fed = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    trees = trees_of([[1, 2, 3], [], [1, 2, 3, 4, 5]], [[-1, -1, 0], [], [-1, 0, -1, 2, 2]])
    spans = Spans(TABLES, [len(k) for k in known], lengths, trees if bent else None)
    runner, _, _ = read_both(model, fed, spans, known, (1, 2))
    assert runner.graphs is not None
    assert runner.graphs.stats.padding_tokens == 5  # 16 of 11
    # The same buffers serve a smaller step next; what is left of the last one is padding.
    at = [len(k) + n for k, n in zip(known, lengths, strict=True)]
    pool = runner.cache.cache.pool.clone()
    next_step = Spans(TABLES, at, [5, 1, 3])
    runner.forward(np.arange(9) % VOCAB, next_step)
    assert (runner.graphs.stats.recorded, runner.graphs.stats.replayed) == (1, 2)
    changed = (runner.cache.cache.pool != pool).any(-1).view(2, 2 * model.config.kv_heads, -1)
    written = np.flatnonzero(changed.any(1).any(0).numpy())
    assert sorted(written.tolist()) == sorted(next_step.slots(4).tolist())


def test_a_pass_that_has_no_graph_is_counted_and_computed_without() -> None:
    model = tiny_llama(VOCAB, 2, 3)
    runner = Runner(model, 64, 4)
    assert runner.use_graphs(8, 40, EagerCapture())
    assert runner.graphs is not None
    table = [list(range(64))]
    long = np.arange(66) % VOCAB
    cases = [("prompt", long, [0], [66]), ("tokens", long[:9], [0], [9]),
             ("context", long[:2], [39], [2])]  # fmt: skip
    for reason, ids, starts, lengths in cases:
        landed = runner.forward(ids, Spans(table, starts, lengths))
        assert runner.graphs.stats.eager[reason] == 1
        assert landed.logits.shape == (len(ids), VOCAB)
        assert landed.after == ()
    assert runner.graphs.stats.replayed == 0
    assert runner.forward(long[:8], Spans(table, [0], [8])).after
    assert runner.graphs.stats.replayed == 1


def test_wide_rows_share_a_graph_that_is_cut_for_few_of_them() -> None:
    runner = Runner(tiny_llama(VOCAB, 2, 3), 64, 4)
    assert runner.use_graphs(32, 64, EagerCapture())
    assert runner.graphs is not None
    tables = [[2 * r, 2 * r + 1] for r in range(32)]
    for rows, tokens in ((32, 1), (4, 8), (8, 4), (9, 3), (3, 8), (30, 1)):
        spans = Spans(tables[:rows], [0] * rows, [tokens] * rows)
        runner.forward(np.zeros(rows * tokens, np.int64), spans)
    cut = sorted(runner.graphs._graphs)
    assert cut == [(24, 3), (32, 4), (32, 8), (32, 32)]


def test_a_model_whose_attention_has_no_static_passes_has_no_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PARLAY_ATTENTION", "sdpa")
    runner = Runner(tiny_llama(VOCAB, 2, 3), 16, 4)
    assert not isinstance(runner.cache, Protocol)
    assert not runner.use_graphs(8, 16, EagerCapture())
    assert runner.graphs is None


def test_recordings_leave_results_where_they_were() -> None:
    x = torch.zeros(3)
    made = EagerCapture().record(lambda: (x + 1, x * 2))
    first, second = made.results
    x.fill_(4.0)
    made.replay()
    assert first.tolist() == [5.0] * 3
    assert second.tolist() == [8.0] * 3


def test_graphs_take_states_and_forget_them() -> None:
    model = tiny_llama(VOCAB, 1, 7, state_layers=(1,))
    runner = Runner(model, 16, 4)
    graphs = Graphs(model, runner.cache, runner._kept, (), 5, (1, 2, 4), EagerCapture(), chosen)
    states = torch.randn(2, model.config.hidden)
    spans = Spans(TABLES[:2], [0, 0], [1, 1])
    for given in (states, None, states):
        expected = model.run(model.embed(torch.tensor([1, 2]), given), runner.cache, spans)[0]
        made = graphs.run(np.asarray([1, 2]), spans, given)
        assert made is not None
        torch.testing.assert_close(made.hidden[:2], expected)


@pytest.mark.parametrize("kind", [StopKind.NONE, StopKind.PROBABILITY])
def test_heads_and_draft_are_replayed_under_stop_rules_too(kind: StopKind) -> None:
    policy = AnyPlan((Proposer.DRAFT_MODEL, Proposer.MEDUSA), 4, stop_rule=StopRule(kind, 0.3))
    backend = graphed(headed_backend(VOCAB, 1))
    ours, _ = run(backend, policy)
    again = AnyPlan((Proposer.DRAFT_MODEL, Proposer.MEDUSA), 4, stop_rule=StopRule(kind, 0.3))
    theirs, _ = run(headed_backend(VOCAB, 1), again)
    assert [r.output for r in ours] == [r.output for r in theirs]
    assert all(s.replayed > 10 and not s.eager for s in backend.graph_stats().values())
