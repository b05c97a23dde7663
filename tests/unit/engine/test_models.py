"""The lean forward over paged KV against Hugging Face's Llama, and both attention kernels alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from tests.tiny import CPU, tiny_config, tiny_llama
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from parlay.engine.attention import sdpa
from parlay.engine.attention.paged import WIDE
from parlay.engine.models import Llama
from parlay.engine.runner import Runner
from parlay.engine.spans import Spans

VOCAB = 60
TABLES = [
    [3, 9, 1, 7, 20, 21, 22, 23],
    [2, 5, 4, 11, 30, 31, 32, 33],
    [8, 6, 10, 12, 40, 41, 42, 43],
    *([row * 8 + i for i in (5, 2, 7, 0, 1, 3, 4, 6)] for row in range(6, 12)),
]


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-5,
        max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.5,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


@pytest.fixture(scope="module")
def ours(theirs: LlamaForCausalLM) -> Llama:
    weights = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    embedding = weights["model.embed_tokens.weight"]
    return Llama(tiny_config(VOCAB, 2), weights, embedding, torch.float32, CPU)


def feed(runner: Runner, ids: Tensor, starts: Sequence[int], ends: Sequence[int]) -> list[Tensor]:
    """Compute each row's tokens starts..ends; return its logits."""
    lengths = [e - s for s, e in zip(starts, ends, strict=True)]
    fed = [ids[r, s:e].tolist() for r, (s, e) in enumerate(zip(starts, ends, strict=True))]
    hidden = runner.read(fed, Spans(TABLES[: len(starts)], starts, lengths))
    return list(runner.model.logits(hidden).split(lengths))


@torch.inference_mode()
def test_logits_are_hugging_faces_over_any_ragged_schedule(
    theirs: LlamaForCausalLM, ours: Llama
) -> None:
    ids = torch.randint(0, VOCAB, (3, 60), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    runner = Runner(ours, 96, 8)
    assert WIDE < 40
    # Wide and narrow rows together, then ragged steps across block edges, then a lone step.
    for starts, ends in (
        ([0, 0, 0], [40, 5, 44]),
        ([40, 5, 44], [41, 21, 47]),
        ([41, 21, 47], [49, 22, 48]),
        ([49, 22, 48], [60, 60, 60]),
    ):
        for row, logits in enumerate(feed(runner, ids, starts, ends)):
            torch.testing.assert_close(
                logits, expected[row, starts[row] : ends[row]], atol=2e-5, rtol=1e-4
            )


@torch.inference_mode()
@pytest.mark.parametrize(
    "lengths",
    [
        [16, 24, 27, 28, 29, 30, 30, 32, 40],  # narrow rows, padded: as many tokens as all rows
        [20, 1, 1, 38],  # the short rows and the long ones apart
        [12, 1, 1, 1, 12, 1],
    ],
)
def test_rows_mix_as_they_do_alone_however_they_are_grouped(
    ours: Llama, lengths: list[int]
) -> None:
    rows = len(lengths)
    ids = torch.randint(0, VOCAB, (rows, 60), generator=torch.Generator().manual_seed(4))
    got = feed(Runner(ours, 96, 8), ids, [0] * rows, lengths)
    for row, logits in enumerate(got):
        (alone,) = feed(Runner(ours, 96, 8), ids[row : row + 1], [0], [lengths[row]])
        torch.testing.assert_close(logits, alone)


@torch.inference_mode()
def test_rejected_tokens_leave_no_trace_in_the_cache(ours: Llama) -> None:
    ids = torch.randint(0, VOCAB, (1, 30), generator=torch.Generator().manual_seed(2))
    wrong = (ids + 7) % VOCAB
    clean, dirty = (Runner(ours, 96, 8) for _ in range(2))
    feed(clean, ids, [0], [12])
    feed(dirty, ids, [0], [12])
    feed(dirty, wrong, [12], [27])
    expected, got = (feed(runner, ids, [12], [20])[0] for runner in (clean, dirty))
    torch.testing.assert_close(got, expected, atol=0.0, rtol=0.0)


def test_both_kernels_mix_alike() -> None:
    q, k, v = (torch.randn(6, n, 8) for n in (5, 32, 32))
    mask = torch.zeros(6, 5, 32).masked_fill(torch.rand(6, 5, 32) < 0.3, float("-inf"))
    torch.testing.assert_close(sdpa.attend_by_gemm(q, k, v, mask), sdpa._sdpa(q, k, v, mask))


@torch.inference_mode()
def test_bfloat16_stays_near_float32() -> None:
    exact, rough = (tiny_llama(VOCAB, 2, 3, dtype) for dtype in (torch.float32, torch.bfloat16))
    ids = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(3))
    both = [feed(Runner(m, 64, 8), ids, [0, 0, 0], [20, 40, 33]) for m in (exact, rough)]
    for a, b in zip(*both, strict=True):
        assert (a - b.float()).abs().max() < 0.1 * a.abs().max()


def test_a_draft_may_read_embeddings_of_another_width() -> None:
    config = dataclasses.replace(tiny_config(VOCAB, 1), hidden=16)
    weights = {name: torch.randn(shape) * 0.3 for name, shape in config.tensor_shapes().items()} | {
        "in_proj.weight": torch.randn(16, 10)
    }
    model = Llama(config, weights, torch.randn(VOCAB, 10), torch.float32, CPU)
    (logits,) = feed(Runner(model, 64, 8), torch.zeros(1, 4, dtype=torch.long), [0], [4])
    assert logits.shape == (4, VOCAB)
    assert bool(torch.isfinite(logits).all())
