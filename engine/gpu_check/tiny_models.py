"""Whole tiny engines with every proposer, of the same random weights on any device in any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parlay.engine.gpu_check.random_plans import RandomPlans
from parlay.engine.gpu_check.shapes import TINY
from parlay.engine.medusa_heads import HeadsConfig, RootedHeads
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.policies.policy import Policy, make_policy
from parlay.policies.types import Proposer

CPU = torch.device("cpu")
CONFIG = EngineConfig(
    max_running=24, token_budget=256, block_tokens=16, target_blocks=512, draft_blocks=512,
    context_tokens=512, prefix_cache=False,
)  # fmt: skip
SIZES = replace(TINY, vocab=13, context=CONFIG.context_tokens)
"""So few tokens that heads and drafts, which were never trained, are right now and then."""
_SPREAD = 0.25
"""Of weights: wide enough that what is said depends on more than the last token."""
_K_MAX = 7
_HEADS = 3


@dataclass(slots=True, frozen=True)
class Mode:
    """A way to decode: proposers to draw from (none: plainly), requests at once, tree width."""

    name: str
    proposers: tuple[Proposer, ...]
    at_once: int = 6
    tree_width: int = 1
    seed: int = 0


NONE, NGRAM, DRAFT, MEDUSA = Proposer
MODES = (
    Mode("all", (NONE, NGRAM, DRAFT, MEDUSA), at_once=24),
    Mode("trees", (NGRAM, DRAFT, MEDUSA), tree_width=3),
    Mode("draft", (DRAFT,)),
    Mode("ngram", (NGRAM,)),
    Mode("medusa", (MEDUSA,)),
    Mode("trees-1", (NGRAM, DRAFT, MEDUSA), at_once=1, tree_width=3, seed=1),
)
PLAIN = (Mode("none-1", (), 1), Mode("none-6", (), 6), Mode("none-24", (), 24))
"""No speculation, at three row counts."""


def tiny_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Draw weights on a CPU, in numbers that bfloat16 holds."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else _drawn(shape, rng)
        for name, shape in config.tensor_shapes().items()
    }


def _drawn(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=rng) * _SPREAD).bfloat16().float()


def tiny_llama(seed: int, dtype: torch.dtype, device: torch.device, layers: int = 2) -> Llama:
    """Return a tiny model; one seed gives the same weights everywhere."""
    config = replace(SIZES, layers=layers)
    weights = tiny_weights(config, seed)
    return Llama(config, weights, weights["model.embed_tokens.weight"], dtype, device)


def tiny_backend(dtype: torch.dtype, device: torch.device, tree_width: int = 1) -> TorchBackend:
    """Return a backend with all proposers.

    The draft is the target itself, a layer short, so that some of what it says holds.
    """
    target, draft = tiny_llama(3, dtype, device), tiny_llama(3, dtype, device, layers=1)
    sizes = HeadsConfig(
        SIZES.hidden, _HEADS, (1, 1), (SIZES.ffn, SIZES.ffn), (1, 2), SIZES.vocab, 1e-5
    )
    rng = torch.Generator().manual_seed(5)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else _drawn(shape, rng)
        for name, shape in sizes.tensor_shapes().items()
    }
    ids = torch.arange(SIZES.vocab)
    head = tiny_weights(SIZES, 3)["lm_head.weight"]
    heads = RootedHeads(sizes, weights, target.embedding, head, ids)
    config = replace(CONFIG, tree_width=tree_width)
    return TorchBackend(target, DraftModel(draft, ids.to(device)), config, heads=heads)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Draw prompts that repeat themselves, so that the n-gram has something to say."""
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, SIZES.vocab, int(rng.integers(3, 24))).tolist() for _ in range(count)]
    return [part + part[: max(len(part) // 2, 1)] for part in parts]


def decode(
    backend: TorchBackend, mode: Mode, asked: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """Return what greedy decoding says to each prompt under a mode."""
    config = replace(backend.config, max_running=mode.at_once)
    policy: Policy = make_policy("none", {}, backend.limits())
    if mode.proposers:
        policy = RandomPlans(mode.proposers, _K_MAX, mode.seed, trees=mode.tree_width > 1)
    engine = Engine(backend, LocalPlanner(policy), config)
    requests = [engine.add(prompt, SamplingParams(max_tokens=tokens)) for prompt in asked]
    while engine.has_work:
        engine.step()
    engine.scheduler.target.check()
    engine.scheduler.draft.check()
    return [request.output for request in requests]
