"""On the real model in float32, greedy output is Hugging Face's own, however it is drafted."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import AnyPlan

from parlay.engine.demo.prompts import demo_prompts
from parlay.engine.kernels import build
from parlay.engine.kernels.native import NativeLlama
from parlay.engine.llm import load_backend
from parlay.engine.models import Llama
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.tokenizer import Tokenizer
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.weights import default_model_dir
from parlay.policies.types import Proposer

NONE, NGRAM, DRAFT = Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL
TOKENS = 64


@pytest.fixture(scope="module")
def loaded() -> tuple[TorchBackend, Tokenizer]:
    config = EngineConfig(target_blocks=900, draft_blocks=900, max_running=8)
    return load_backend(dtype="float32", config=config)


@pytest.fixture(scope="module")
def prompts(loaded: tuple[TorchBackend, Tokenizer]) -> list[list[int]]:
    texts = [p.text for p in demo_prompts()[:20]]
    assert len(texts) == 20
    return [loaded[1].chat([{"role": "user", "content": text}]) for text in texts]


@pytest.fixture(scope="module")
def theirs(prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32)
    outputs = []
    for ids in prompts:
        whole = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=TOKENS,
        )
        outputs.append(whole[0, len(ids) :].tolist())
    return outputs


@pytest.mark.parametrize(
    "proposers",
    [(NONE,), (NGRAM,), (DRAFT,), (NONE, NGRAM, DRAFT)],
    ids=["none", "ngram", "draft", "mix"],
)
def test_greedy_is_hugging_faces(
    loaded: tuple[TorchBackend, Tokenizer],
    prompts: list[list[int]],
    theirs: list[list[int]],
    proposers: tuple[Proposer, ...],
) -> None:
    backend, tokenizer = loaded
    engine = Engine(
        backend, LocalPlanner(AnyPlan(proposers, 7)), backend.config, eos_ids=tokenizer.eos_ids
    )
    requests = [engine.add(ids, SamplingParams(max_tokens=TOKENS)) for ids in prompts]
    while engine.has_work:
        engine.step()
    for request, expected in zip(requests, theirs, strict=True):
        assert request.output == expected
    if proposers != (NONE,):
        assert sum(r.accepted for r in requests) > 50


@pytest.mark.skipif(build.load() is None, reason="needs AVX512_BF16 and a C compiler")
def test_with_the_kernels_bfloat16_is_the_same_whatever_is_drafted_and_batched(
    prompts: list[list[int]],
) -> None:
    def outputs(policy: AnyPlan, running: int) -> list[list[int]]:
        config = EngineConfig(target_blocks=900, draft_blocks=900, max_running=running)
        backend, tokenizer = load_backend(dtype="bfloat16", config=config)
        assert isinstance(backend.target, NativeLlama)
        engine = Engine(backend, LocalPlanner(policy), config, eos_ids=tokenizer.eos_ids)
        requests = [engine.add(ids, SamplingParams(max_tokens=TOKENS)) for ids in prompts[:10]]
        while engine.has_work:
            engine.step()
        return [r.output for r in requests]

    alone = outputs(AnyPlan((NONE,), 0), running=1)
    assert outputs(AnyPlan((NONE,), 0), running=10) == alone
    assert outputs(AnyPlan((NONE, NGRAM, DRAFT), 7), running=7) == alone


@pytest.mark.slow
def test_batch_invariant_on_torch_bfloat16_is_the_same_whatever_is_drafted_and_batched(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parlay.engine.kernels.native.fits", lambda *_: False)

    def outputs(policy: AnyPlan, running: int) -> list[list[int]]:
        config = EngineConfig(target_blocks=900, draft_blocks=900, max_running=running)
        backend, tokenizer = load_backend(dtype="bfloat16", config=config, batch_invariant=True)
        assert isinstance(backend.target, Llama)
        engine = Engine(backend, LocalPlanner(policy), config, eos_ids=tokenizer.eos_ids)
        requests = [engine.add(ids, SamplingParams(max_tokens=32)) for ids in prompts[:5]]
        while engine.has_work:
            engine.step()
        return [r.output for r in requests]

    alone = outputs(AnyPlan((NONE,), 0), running=1)
    assert outputs(AnyPlan((NONE, NGRAM, DRAFT), 7), running=5) == alone
