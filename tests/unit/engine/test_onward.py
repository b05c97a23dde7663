"""Reading one token more of some rows a pass: the same bits as reading them in any other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.tiny import tiny_config, tiny_llama

from parlay.engine.kernels import build
from parlay.engine.kernels.native import NativeLlama
from parlay.engine.kernels.onward import NativeOnward
from parlay.engine.proposers.confidence import likeliest
from parlay.engine.proposers.onward import onward
from parlay.engine.runner import Model, Runner
from parlay.engine.spans import Spans

VOCAB = 77
TABLES = [[3, 9, 1, 7], [2, 5, 4, 11], [8, 6, 10, 12]]
STARTS = [31, 15, 3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def native() -> Model:
    config = dataclasses.replace(tiny_config(VOCAB, 2), hidden=96, ffn=160, head_dim=32)
    rng = torch.Generator().manual_seed(5)
    weights = {n: torch.randn(s, generator=rng) * 0.2 for n, s in config.tensor_shapes().items()}
    return NativeLlama(config, weights, weights["model.embed_tokens.weight"])


def model_of(kind: str) -> Model:
    if kind == "torch":
        return tiny_llama(VOCAB, 2, 4)
    if build.load() is None:
        pytest.skip("needs AVX512_BF16 and a C compiler")
    return native()


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["torch", "native"])
def test_it_reads_as_the_runner_does(kind: str) -> None:
    model = model_of(kind)
    ids = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(2)).numpy()
    ours, theirs = Runner(model, 16, 16), Runner(model, 16, 16)
    for runner in (ours, theirs):
        fed = [row[:n].tolist() for row, n in zip(ids, STARTS, strict=True)]
        runner.read(fed, Spans(TABLES, [0] * 3, STARTS))
    ahead = onward(ours, TABLES, STARTS, 4)
    assert isinstance(ahead, NativeOnward) == (kind == "native")
    for step, alive in enumerate(([0, 1, 2], [0, 2], [0, 2], [2])):
        rows, at = np.asarray(alive), [STARTS[r] + step for r in alive]
        tokens = ids[rows, at]
        expected = theirs.read(
            [[t] for t in tokens.tolist()],
            Spans([TABLES[r] for r in alive], at, [1] * len(alive)),
        )
        got = ahead.read(rows, tokens, step)
        torch.testing.assert_close(got, model.logits(expected), atol=0, rtol=0)


def test_the_likeliest_is_the_first_of_the_largest_as_torch_has_it() -> None:
    p = torch.softmax(torch.randn(50, 300, generator=torch.Generator().manual_seed(1)).round(), -1)
    index, peak = likeliest(p)
    expected = p.max(-1)
    assert index.tolist() == expected.indices.tolist()
    assert peak.tolist() == expected.values.tolist()
