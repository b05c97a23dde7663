"""A tiny random target, and answers of its own, for tests of distillation."""

from __future__ import annotations

import torch
from torch import Tensor

from parlay.engine.distill.examples import Example
from parlay.engine.distill.generate import Decoder, Job, generate
from parlay.engine.distill.llama import Target, target_of
from parlay.engine.model_config import ModelConfig

CONFIG = ModelConfig(
    hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=48,
    rope_theta=10000.0, norm_eps=1e-5, context=128, tied=True, eos_ids=(1,),
)  # fmt: skip
LAYERS = (1, 3)
"""Of the states that its students read."""


def tiny_weights(seed: int = 0, config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=rng) * 0.3
        for name, shape in config.tensor_shapes().items()
    }


def tiny_target(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Target:
    return target_of(CONFIG, tiny_weights(seed), dtype)


def tiny_answers() -> list[Example]:
    """What it answers to 120 random prompts of four tokens, with its states."""
    rng = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, 48, (120, 4), generator=rng).tolist()
    jobs = [Job("t", prompt, 0.0, i) for i, prompt in enumerate(prompts)]
    ended: list[Job] = []
    generate(Decoder(CONFIG, tiny_weights(), 32, LAYERS), jobs, 16, ended.append)
    return [Example("t", [*j.prompt, *j.out], 4, torch.cat(j.states)) for j in ended]
