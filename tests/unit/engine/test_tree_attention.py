"""Trees over paged KV: a node gets the logits of its own path; what holds moves into place."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.tiny import CPU, tiny_config, tiny_llama
from torch import Tensor

from parlay.engine.attention.paged import PagedKV, plan_ragged
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.models import Llama
from parlay.engine.request import Request, SampleMode, SamplingParams
from parlay.engine.runner import Runner
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.spans import Spans, kept_nodes
from parlay.engine.tree import Trees, trees_of
from parlay.engine.tree_verify import accept_trees
from parlay.policies.types import Array

VOCAB, SIZE = 30, 4
TABLES = [[row + 6 * i for i in (3, 9, 1, 7, 2, 8, 0, 4, 6, 5, 10, 11)] for row in range(6)]
NODES = [
    ([4, 5, 6, 5, 7, 9, 5], [-1, -1, 0, 0, 2, 1, 5]),  # crosses blocks
    ([], []),  # decodes without drafts
    ([8, 2, 3], [-1, 0, 1]),  # a chain
    ([], []),  # a prompt's chunk
    ([1, 2, 3, 4, 5], [-1, -1, -1, -1, -1]),
]
TEXT = [9, 13, 6, 41, 5]
"""Tokens of each row that are there before the pass; the pass computes CHUNK more of them."""
CHUNK = [1, 1, 1, 35, 3]


@pytest.fixture(scope="module")
def model() -> Llama:
    return tiny_llama(VOCAB, 2, 3)


def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, n).tolist() for n in TEXT]


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def pass_over(chosen: list[int]) -> tuple[list[list[int]], Spans]:
    """Return what rows `chosen` feed, and the spans of it."""
    trees = trees_of([NODES[r][0] for r in chosen], [NODES[r][1] for r in chosen])
    text = texts()
    fed = [text[r][TEXT[r] - CHUNK[r] :] + NODES[r][0] for r in chosen]
    starts = [TEXT[r] - CHUNK[r] for r in chosen]
    return fed, Spans([TABLES[r] for r in chosen], starts, [len(f) for f in fed], trees)


def before(runner: Runner, chosen: list[int]) -> None:
    """Compute what lies before the pass."""
    for r in chosen:
        if known := texts()[r][: TEXT[r] - CHUNK[r]]:
            runner.read([known], Spans([TABLES[r]], [0], [len(known)]))


@torch.inference_mode()
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [0], [4, 0, 2], [2, 1]])
def test_each_nodes_logits_are_those_of_its_path_alone(model: Llama, chosen: list[int]) -> None:
    runner = Runner(model, 72, SIZE, taps=(1,))
    before(runner, chosen)
    fed, spans = pass_over(chosen)
    hidden = runner.read(fed, spans)
    got = model.logits(hidden).split(list(spans.lengths))
    for logits, r in zip(got, chosen, strict=True):
        tokens, parents = NODES[r]
        paths = [path_to(parents, node) for node in range(-1, len(tokens))]
        for node, path in enumerate(paths, -1):
            line = texts()[r] + [tokens[n] for n in path]
            alone = Runner(model, 72, SIZE)
            expected = model.logits(alone.read([line], Spans([TABLES[r]], [0], [len(line)])))
            mine = logits[CHUNK[r] + node]
            torch.testing.assert_close(mine, expected[-1], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_a_window_counts_positions_not_places(window: int | None) -> None:
    config = dataclasses.replace(tiny_config(VOCAB, 1), kv_heads=2, heads=4)
    rng = torch.Generator().manual_seed(2)
    fed, spans = pass_over([0, 4])
    cache = SdpaAttention(PagedKV(config, 72, SIZE, torch.float32, CPU), 4)
    cache.cache.layers[0].normal_(generator=rng)
    q, kv = (torch.randn(sum(map(len, fed)), 4, 4, generator=rng) for _ in range(2))
    clean = cache.cache.layers[0].clone()
    got = cache(0, q, kv, plan_ragged(cache.cache, spans, 2, window))
    first = 0
    for i, r in enumerate([0, 4]):
        for node in range(len(NODES[r][0])):
            # The path as a chain: its own queries, keys and values, nobody else's.
            rows = [first + j for j in range(CHUNK[r])]
            rows += [first + CHUNK[r] + n for n in path_to(NODES[r][1], node)]
            cache.cache.layers[0].copy_(clean)
            chain = Spans([TABLES[r]], [spans.starts[i]], [len(rows)])
            alone = cache(0, q[rows], kv[rows], plan_ragged(cache.cache, chain, 2, window))
            torch.testing.assert_close(got[rows[-1]], alone[-1], atol=1e-5, rtol=1e-5)
        first += spans.lengths[i]


@torch.inference_mode()
def test_the_accepted_path_moves_to_where_plain_decoding_would_have_put_it(model: Llama) -> None:
    runner, plain = (Runner(model, 72, SIZE, taps=(1, 2)) for _ in range(2))
    chosen = [0, 2, 4]
    before(runner, chosen)
    fed, spans = pass_over(chosen)
    runner.read(fed, spans)
    # Row 0's nodes 1, 5, 6; all of row 2's chain; row 4's node 3.
    path = np.asarray([[1, 5, 6], [0, 1, 2], [3, -1, -1]])
    source, target = kept_nodes(spans, path, SIZE)
    assert len(source) == 4, "a chain stays where it is"
    runner.move(source, target)
    for r, nodes in zip(chosen, path.tolist(), strict=True):
        line = texts()[r] + [NODES[r][0][n] for n in nodes if n >= 0]
        plain.read([line], Spans([TABLES[r]], [0], [len(line)]))
        slots = torch.from_numpy(Spans([TABLES[r]], [0], [len(line)]).slots(SIZE))
        torch.testing.assert_close(runner._kept[slots], plain._kept[slots], atol=1e-5, rtol=1e-5)
        ours, theirs = (
            [layer.view(4, -1, 4)[:, slots] for layer in one.cache.cache.layers]
            for one in (runner, plain)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def random_trees(rng: np.random.Generator, requests: list[Request], right: list[int]) -> Trees:
    """Return a tree a row; some of its paths follow `right`, what each text goes on with."""
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    for request in requests:
        family: dict[tuple[int, int], int] = {}
        depth = {-1: 0}
        for _ in range(int(rng.integers(0, 9))):
            parent = int(rng.integers(-1, len(family)))
            at = len(request.tokens) + depth[parent]
            good = at < len(right) and rng.random() < 0.6
            token = right[at] if good else int(rng.integers(0, VOCAB))
            if (parent, token) not in family:
                depth[len(family)] = depth[parent] + 1
                family[parent, token] = len(family)
        parents.append([p for p, _ in family])
        tokens.append([t for _, t in family])
    return trees_of(tokens, parents)


def decode_by_trees(model: Llama, requests: list[Request], right: list[int], seed: int) -> int:
    """Grow the requests until one has 32 tokens more; return how many drafts were accepted."""
    rng = np.random.default_rng(seed)
    runner, rows, accepted = Runner(model, 72, SIZE), np.arange(len(requests)), 0
    while max(r.output_tokens for r in requests) < 32:
        trees = random_trees(rng, requests, right)
        nodes = np.split(trees.tokens, trees.starts[1:-1])
        fed = [r.tokens[r.computed :] + n.tolist() for r, n in zip(requests, nodes, strict=True)]
        starts, lengths = [r.computed for r in requests], [len(f) for f in fed]
        spans = Spans(TABLES[: len(requests)], starts, lengths, trees)
        hidden = runner.read(fed, spans)
        ends = np.cumsum(lengths)
        places: Array = np.concatenate(
            [np.arange(e - 1 - n, e) for e, n in zip(ends, trees.counts, strict=True)]
        )
        logits = model.logits(hidden[torch.from_numpy(places)])
        found = accept_trees(logits, requests, rows, trees, None, 5)
        source, target = kept_nodes(spans, found.path, SIZE)
        runner.cache.move(torch.from_numpy(source), torch.from_numpy(target))
        for row, request in enumerate(requests):
            held = int(found.accepted[row])
            request.computed = len(request.tokens) + held
            request.tokens.extend(found.tokens[row, : held + 1].tolist())
            accepted += held
    return accepted


@torch.inference_mode()
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.9, seed=3)])
def test_decoding_by_random_trees_gives_the_text_of_plain_decoding(
    model: Llama, params: SamplingParams
) -> None:
    prompt = [1, 2, 3, 1, 2]
    right = plain_text(model, prompt, params)
    requests = [Request(i, list(prompt), len(prompt), params) for i in range(3)]
    accepted = decode_by_trees(model, requests, right, seed=4)
    assert accepted > 20, "the trees were too poor to test anything"
    for request in requests:
        shared = min(len(request.tokens), len(right))
        assert request.tokens[:shared] == right[:shared]


def plain_text(model: Llama, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the prompt and 42 tokens, drawn one by one from a fresh cache each."""
    text, request = list(prompt), Request(0, list(prompt), len(prompt), params)
    key, ids = request_key(request, 5), torch.arange(VOCAB)

    def drawn(logits: Tensor) -> int:
        if params.mode is SampleMode.GREEDY:
            return int(logits.argmax())
        draw = draw_key(key, len(text) - len(prompt), Purpose.COUPLED)
        return int(race(probabilities(logits, [params]), [draw], ids))

    while len(text) < len(prompt) + 42:
        spans = Spans([TABLES[0]], [0], [len(text)])
        text.append(drawn(model.logits(Runner(model, 72, SIZE).read([text], spans)[-1:])))
    return text
