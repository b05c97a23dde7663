"""Tiny checkpoints with random weights that vLLM can load, and engines made of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from tests.tiny import AnyPlan
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from parlay.engine.planner import LocalPlanner
from parlay.policies.types import Proposer

VOCAB, HIDDEN, HEADS = 272, 128, 4
K_MAX = 5
SPECIAL = ("<pad>", "<bos>", "<eos>")


def make_checkpoints(folder: Path) -> None:
    """Write target, draft (its first three layers of four) and medusa (its head, thrice)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=192, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=HIDDEN // HEADS, vocab_size=VOCAB,
        max_position_embeddings=512, initializer_range=0.35, tie_word_embeddings=False,
        pad_token_id=256, bos_token_id=257, eos_token_id=258,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    tokenizer = _tokenizer()
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    head = model.lm_head.weight.detach()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    model.save_pretrained(folder / "draft")
    tokenizer.save_pretrained(folder / "draft")
    _save_medusa(folder / "medusa", head)


def _save_medusa(folder: Path, head: torch.Tensor, heads: int = 3) -> None:
    folder.mkdir()
    weights = {f"lm_heads.{i}.weight": head.clone() for i in range(heads)}
    blank = {f"blocks.{i}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for i in range(heads)}
    save_file({**weights, **blank}, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN,
        "vocab_size": VOCAB, "medusa_num_heads": heads, "medusa_num_layers": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *SPECIAL])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, bos_token=bos, eos_token=eos
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def speculation(method: str, folder: Path, k: int = K_MAX) -> dict[str, Any]:
    """Return a speculative_config."""
    if method == "ngram":
        lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        return {"method": "ngram", "num_speculative_tokens": k, **lookup}
    if method == "suffix":
        return {"method": "suffix", "num_speculative_tokens": k}
    if method == "medusa":
        k = 3
    return {
        "method": method,
        "model": str(folder / method.split("_")[0]),
        "num_speculative_tokens": k,
    }


class _Nothing:
    """A stream or an event of a device that there is not."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: True


@contextlib.contextmanager
def asynchronous() -> Iterator[None]:
    """Let vLLM schedule a step ahead on a CPU as well, where it would not."""
    from vllm.platforms.cpu import CpuPlatform

    ordinary = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        ordinary(config)
        config.scheduler_config.async_scheduling = True

    with contextlib.ExitStack() as stack:
        for owner, name, stub in (
            (torch, "Event", _Nothing),
            (torch.cuda, "Event", _Nothing),
            (torch.cuda, "Stream", _Nothing),
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
            (torch.cuda, "current_stream", _Nothing),
            (CpuPlatform, "check_and_update_config", staticmethod(check)),
        ):
            stack.enter_context(mock.patch.object(owner, name, stub))
        yield


@contextlib.contextmanager
def engine(
    folder: Path, method: str | None, steered: bool = True, **settings: Any
) -> Iterator[Any]:
    """Start vLLM in this process, with parlay in it or without."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.triton_utils import dispatcher

    from parlay.engine.plugins.vllm import register, unregister

    given = {
        "model": str(folder / "target"), "dtype": "float32", "enforce_eager": True, "seed": 0,
        "max_model_len": 256, "max_num_seqs": 8, "disable_log_stats": False,
        "max_num_batched_tokens": 256,
        "speculative_config": None if method is None else speculation(method, folder),
    }  # fmt: skip
    with mock.patch.dict(os.environ, {"PARLAY": str(int(steered))}):
        register()
        llm = vllm.LLM(**{**given, **settings})
    unregister()
    # They are there from now on; vLLM registers them again for another engine, and fails.
    dispatcher.register_kernels = lambda overrides: None
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def decide_at_random(llm: Any, *proposers: Proposer, seed: int = 0) -> None:
    """Let every request draft another k with another proposer in every step."""
    steering = scheduler_of(llm).parlay
    steering.adapter.planner = LocalPlanner(AnyPlan(proposers, K_MAX, seed))


def prompts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts of 4 to 60 tokens, every other one with a part that repeats."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        ids = rng.integers(0, 250, rng.integers(4, 30)).tolist()
        made.append({"prompt_token_ids": ids * (1 + i % 2)})
    return made


def answers(llm: Any, asked: list[dict[str, Any]], **sampling: Any) -> list[list[int]]:
    """Return the tokens that an engine answers; greedily, if nothing else is said."""
    import vllm

    extra = sampling.pop("extra_args", [None] * len(asked))
    given = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **sampling}
    how = [vllm.SamplingParams(**given, extra_args=e) for e in extra]
    done = llm.generate(asked, how, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


def metric(llm: Any, name: str) -> int:
    """Return one of vLLM's own counters."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == f"vllm:{name}")


def server_arguments(folder: Path, method: str) -> list[str]:
    """Return a server's arguments for the same small engine."""
    return [
        *("--model", str(folder / "target"), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
        *("--speculative-config", json.dumps(speculation(method, folder))),
    ]
