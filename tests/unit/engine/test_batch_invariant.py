"""With batch_invariant a token has the same bits alone, in a batch, in chunks and in trees."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.serving import tiny_checkpoint
from tests.tiny import CPU, INTERPRETED, tiny_config, tiny_weights
from torch import Tensor

from parlay.engine.attention.alone import AloneAttention
from parlay.engine.attention.paged import PagedKV
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.generate import Placement, generate, open_engine
from parlay.engine.linear import TILE_ROWS, make_linear, tiled
from parlay.engine.models import Llama
from parlay.engine.request import SamplingParams
from parlay.engine.runner import Runner
from parlay.engine.spans import Spans
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.tree import trees_of

VOCAB, SIZE = 64, 4
TABLES = [[row + 6 * i for i in (3, 9, 1, 7, 2, 8, 0, 4, 6, 5, 10, 11)] for row in range(6)]
TREE = [4, 5, 6, 5, 7], [-1, -1, 0, 0, 2]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def llama(dtype: torch.dtype, invariant: bool = True) -> Llama:
    config = dataclasses.replace(
        tiny_config(VOCAB, 2), hidden=96, ffn=160, heads=6, kv_heads=2, head_dim=16
    )
    weights = tiny_weights(config.tensor_shapes(), torch.Generator().manual_seed(3))
    embedding = weights["model.embed_tokens.weight"]
    return Llama(config, weights, embedding, dtype, CPU, invariant)


def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, n).tolist() for n in (41, 9, 23, 34)]


def alone(model: Llama, text: list[int]) -> Tensor:
    """Return the logits of every token, computed one by one."""
    runner = Runner(model, 72, SIZE)
    rows = [
        model.logits(runner.read([[token]], Spans([TABLES[0]], [place], [1])))
        for place, token in enumerate(text)
    ]
    return torch.cat(rows)


@DTYPES
@torch.inference_mode()
def test_a_batch_of_chunks_has_the_bits_of_one_token_at_a_time(dtype: torch.dtype) -> None:
    model, some = llama(dtype), texts()
    runner, got = Runner(model, 72, SIZE), [list[Tensor]() for _ in some]
    for begin, end in ((0, 5), (5, 6), (6, 27), (27, 41)):
        rows = [r for r, text in enumerate(some) if len(text) > begin]
        fed = [some[r][begin:end] for r in rows]
        lengths = [len(f) for f in fed]
        hidden = runner.read(fed, Spans([TABLES[r] for r in rows], [begin] * len(rows), lengths))
        for r, logits in zip(rows, model.logits(hidden).split(lengths), strict=True):
            got[r].append(logits)
    for text, found in zip(some, got, strict=True):
        assert torch.equal(torch.cat(found), alone(model, text))


@DTYPES
@torch.inference_mode()
def test_a_trees_nodes_have_the_bits_of_their_paths_alone(dtype: torch.dtype) -> None:
    model, (text, other) = llama(dtype), texts()[:2]
    runner = Runner(model, 72, SIZE)
    runner.read([text[:-1]], Spans([TABLES[0]], [0], [len(text) - 1]))
    tokens, parents = TREE
    trees = trees_of([tokens, []], [parents, []])
    fed = [[text[-1], *tokens], other]
    spans = Spans(TABLES[:2], [len(text) - 1, 0], [len(f) for f in fed], trees)
    logits = model.logits(runner.read(fed, spans))
    for node in range(len(tokens)):
        path, at = list[int](), node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        assert torch.equal(logits[1 + node], alone(model, text + path)[-1])


@pytest.mark.skipif(INTERPRETED, reason="a Triton program's sums do not go by who is beside it")
@torch.inference_mode()
def test_without_it_a_batch_rounds_otherwise_here() -> None:
    """Else the tests above show nothing."""
    model, text = llama(torch.float32, invariant=False), texts()[0]
    whole = Runner(model, 72, SIZE).read([text], Spans([TABLES[0]], [0], [len(text)]))
    assert not torch.equal(model.logits(whole), alone(model, text))


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_attending_alone_is_the_same_attention(window: int | None) -> None:
    config = dataclasses.replace(tiny_config(VOCAB, 1), kv_heads=2, heads=4)
    rng = torch.Generator().manual_seed(2)
    spans = Spans(
        TABLES[:2], [12, 7], [len(TREE[0]) + 1, 3], trees_of([TREE[0], []], [TREE[1], []])
    )
    batched = SdpaAttention(PagedKV(config, 72, SIZE, torch.float32, CPU), 4)
    batched.cache.layers[0].normal_(generator=rng)
    single = AloneAttention(PagedKV(config, 72, SIZE, torch.float32, CPU), 4)
    single.cache.layers[0].copy_(batched.cache.layers[0])
    q, kv = (torch.randn(sum(spans.lengths), 4, 4, generator=rng) for _ in range(2))
    expected = batched(0, q, kv, batched.plan(spans, window))
    got = single(0, q, kv, single.plan(spans, window))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_machine_that_rounds_rows_by_place_is_refused() -> None:
    weight = torch.randn(8, 16)

    def by_place(x: Tensor) -> Tensor:
        return x @ weight.T + 1e-3 * torch.arange(len(x))[:, None]

    with pytest.raises(ValueError, match=r"^batch_invariant: .*leave it off$"):
        tiled(by_place, 16, torch.float32, CPU)


@pytest.mark.parametrize("rows", [1, TILE_ROWS, TILE_ROWS + 1, 50])
def test_tiles_compute_what_the_linear_does(rows: int) -> None:
    weight, x = torch.randn(8, 16), torch.randn(rows, 16)
    linear = make_linear(weight, pack=False)
    torch.testing.assert_close(tiled(linear, 16, torch.float32, CPU)(x), x @ weight.T)


def test_an_engine_is_opened_with_it(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    with open_engine(folder, "none", {}, None, Placement("float32", batch_invariant=True)) as (
        engine,
        tokenizer,
    ):
        assert isinstance(engine.backend, TorchBackend)
        assert isinstance(engine.backend.runner.cache, AloneAttention)
        done = generate(engine, tokenizer, [1, 2, 3], SamplingParams(max_tokens=4), print)
    assert done.output_tokens == 4
