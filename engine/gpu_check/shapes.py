"""Shapes of models to measure, and random weights for them, made where they are to lie."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama

_SPREAD = 0.02
"""Standard deviation of a weight: what Llama was initialised with."""
DRAFT_HEAD = 32_000
"""Rows of a trimmed output layer, as EAGLE-3's published heads have."""


@dataclass(slots=True, frozen=True)
class Shape:
    """A target and the model that drafts for it, by sizes alone."""

    name: str
    target: ModelConfig
    draft: ModelConfig


def _llama(
    hidden: int, layers: int, heads: int, ffn: int, tied: bool, vocab: int = 128_256
) -> ModelConfig:
    return ModelConfig(
        hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=hidden // heads, ffn=ffn,
        vocab=vocab, rope_theta=500_000.0, norm_eps=1e-5, context=8192, tied=tied, eos_ids=(),
    )  # fmt: skip


_1B = _llama(2048, 16, 32, 8192, tied=True)
_8B = _llama(4096, 32, 32, 14_336, tied=False)
TINY = ModelConfig(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=61, rope_theta=10_000.0,
    norm_eps=1e-5, context=8192, tied=False, eos_ids=(),
)  # fmt: skip
SHAPES = {
    # Below 1B there is no Llama: one layer of the target's width drafts, as EAGLE-3 does.
    "1b": Shape("1b", _1B, replace(_1B, layers=1, tied=False)),
    "8b": Shape("8b", _8B, _1B),
    "tiny": Shape("tiny", TINY, replace(TINY, layers=1)),
}
"""By name: Llama-3.2-1B and Llama-3.1-8B from their published configurations, and a tiny one."""


class RandomWeights(Mapping[str, Tensor]):
    """A checkpoint that is not there: each tensor is drawn on `device` when it is asked for.

    Matrices are N(0, spread^2), norms 1. Nothing is kept, so that no more than the model and one
    layer's parts are in memory; asked again, a tensor is another one.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        spread: float = _SPREAD,
    ) -> None:
        self.shapes, self.dtype, self.device = config.tensor_shapes(), dtype, device
        self.spread = spread
        self._rng = torch.Generator(device).manual_seed(seed)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device)
        return drawn.normal_(std=self.spread, generator=self._rng)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def random_llama(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Llama:
    """Return a model of distinct random weights on a device, without a copy on the host."""
    weights = RandomWeights(config, dtype, device, seed)
    return Llama(config, weights, weights["model.embed_tokens.weight"], dtype, device)


def parameters(config: ModelConfig) -> int:
    """Return how many numbers a model's weights are."""
    return sum(prod(shape) for shape in config.tensor_shapes().values())


def read_parameters(config: ModelConfig) -> int:
    """Return how many of them one pass reads whole: not an embedding that is no output layer."""
    return parameters(config) - (0 if config.tied else config.vocab * config.hidden)


def kv_numbers(config: ModelConfig) -> int:
    """Return how many numbers the keys and values of one token are."""
    return 2 * config.layers * config.kv_heads * config.head_dim


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
