"""Trees in the CPU kernels: a node gets the bits of its path alone, and moved slots are its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.tiny import tiny_config
from torch import Tensor

from parlay.engine.kernels import build
from parlay.engine.kernels.native import NativeLlama
from parlay.engine.model_config import ModelConfig
from parlay.engine.runner import Runner
from parlay.engine.spans import Spans, kept_nodes
from parlay.engine.tree import trees_of

VOCAB = 77
TABLES = [[row + 3 * i for i in range(12)] for row in range(3)]
SHAPES = {
    "share 3": (6, 2, 64),
    "share 5": (5, 1, 64),
    "wide heads": (6, 2, 128),
    "narrow": (4, 4, 32),
}

pytestmark = pytest.mark.skipif(build.load() is None, reason="needs AVX512_BF16 and a C compiler")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model_of(shape: str) -> NativeLlama:
    heads, kv_heads, head_dim = SHAPES[shape]
    config: ModelConfig = dataclasses.replace(
        tiny_config(VOCAB, 2), hidden=96, ffn=160, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, context=256,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(5)
    weights: dict[str, Tensor] = {
        n: 0.2 * torch.randn(s, generator=rng) + (len(s) == 1)
        for n, s in config.tensor_shapes().items()
    }
    return NativeLlama(config, weights, weights["model.embed_tokens.weight"])


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_a_node_gets_the_very_bits_of_its_path_alone(shape: str) -> None:
    model, rng = model_of(shape), np.random.default_rng(3)
    text = [rng.integers(0, VOCAB, n).tolist() for n in (37, 16, 90)]
    chunk = [1, 16, 5]
    nodes = [64, 0, 21]
    tokens = [rng.permutation(VOCAB)[:n].tolist() for n in nodes]
    parents = [[int(rng.integers(max(-1, i - 9), i)) for i in range(n)] for n in nodes]
    runner = Runner(model, 40, 16, taps=(1,))
    for row, known in enumerate(text):
        if begin := known[: len(known) - chunk[row]]:
            runner.read([begin], Spans([TABLES[row]], [0], [len(begin)]))
    fed = [t[len(t) - c :] + n for t, c, n in zip(text, chunk, tokens, strict=True)]
    starts, lengths = [len(t) - c for t, c in zip(text, chunk, strict=True)], list(map(len, fed))
    spans = Spans(TABLES, starts, lengths, trees_of(tokens, parents))
    got = runner.read(fed, spans).split(lengths)
    for row in range(3):
        for node in range(-1, nodes[row], 4):
            line = text[row] + [tokens[row][n] for n in path_to(parents[row], node)]
            alone = Runner(model, 40, 16)
            expected = alone.read([line], Spans([TABLES[row]], [0], [len(line)]))[-1]
            torch.testing.assert_close(got[row][chunk[row] + node], expected, atol=0, rtol=0)
    # What holds is moved, and the next token is the very one of a text that never saw a tree.
    deepest = [path_to(parents[row], n - 1) for row, n in enumerate(nodes)]
    path = np.full((3, max(map(len, deepest))), -1)
    for row, held in enumerate(deepest):
        path[row, : len(held)] = held
    source, target = kept_nodes(spans, path, 16)
    assert len(source) > 3
    runner.cache.move(torch.from_numpy(source), torch.from_numpy(target))
    for row, held in enumerate(deepest):
        line = text[row] + [tokens[row][n] for n in held]
        alone = Runner(model, 40, 16)
        expected = alone.read([[*line, 7]], Spans([TABLES[row]], [0], [len(line) + 1]))[-1]
        mine = runner.read([[7]], Spans([TABLES[row]], [len(line)], [1]))[0]
        torch.testing.assert_close(mine, expected, atol=0, rtol=0)


def test_blocks_move_as_they_lie() -> None:
    model = model_of("share 3")
    cache, rng = model.new_cache(5, 16), torch.Generator().manual_seed(0)
    heads, dim = model.config.kv_heads, model.config.head_dim
    for held in (*cache.keys, *cache.values):
        held.copy_(torch.randn(held.shape, generator=rng))
    # By slot: pairs of a key's numbers lie 16 positions apart, values one behind the other.
    keys = [k.view(5, heads, dim // 2, 16, 2).permute(0, 3, 1, 2, 4) for k in cache.keys]
    values = [v.transpose(1, 2) for v in cache.values]
    # Overlapping: 17 is read for 16 and written from 18.
    source, target = torch.tensor([17, 18, 19, 70]), torch.tensor([16, 17, 63, 3])
    expected = [held.flatten(0, 1).clone() for held in (*keys, *values)]
    for slots in expected:
        slots[target] = slots[source]
    cache.move(source, target)
    for held, slots in zip((*keys, *values), expected, strict=True):
        assert torch.equal(held.flatten(0, 1), slots)
