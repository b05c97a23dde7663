"""A tiny Llama with random weights, target and draft, for tests of laws and identity."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import numpy as np
import torch

from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.policies.policy import Stateless
from parlay.policies.types import BatchView, Plan, Proposer, StepOutcome, StopRule

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("PARLAY_ATTENTION") == "triton"
"""Triton's interpreter attends, which takes a thousand times as long as torch does."""
CONFIG = EngineConfig(
    max_running=48,
    token_budget=256,
    block_tokens=4,
    target_blocks=1024,
    draft_blocks=1024,
    context_tokens=128,
)


def fewer(count: int, part: int) -> int:
    """Return `count` of draws or tokens, one in `part` of them where they are interpreted."""
    return count // part if INTERPRETED else count


def tiny_config(vocab: int, layers: int, context: int = 128) -> ModelConfig:
    return ModelConfig(
        hidden=16, layers=layers, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=vocab,
        rope_theta=10000.0, norm_eps=1e-5, context=context, tied=False, eos_ids=(),
    )  # fmt: skip


def tiny_weights(
    shapes: Mapping[str, tuple[int, ...]], rng: torch.Generator
) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=rng) * 0.4
        for name, shape in shapes.items()
    }


def tiny_llama(
    vocab: int,
    layers: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    state_layers: tuple[int, ...] = (),
    context: int = 128,
) -> Llama:
    config = dataclasses.replace(tiny_config(vocab, layers, context), state_layers=state_layers)
    rng = torch.Generator().manual_seed(seed)
    weights = tiny_weights(config.tensor_shapes(), rng)
    if state_layers:
        width = len(state_layers) * config.hidden
        weights["state_proj.weight"] = torch.randn(config.hidden, width, generator=rng)
    return Llama(config, weights, weights["model.embed_tokens.weight"], dtype, CPU)


def tiny_backend(
    vocab: int = 5,
    seed: int = 0,
    config: EngineConfig = CONFIG,
    state_layers: tuple[int, ...] = (),
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> TorchBackend:
    """Target of two layers; a draft of one that does not know the target's last token.

    dtypes: the target's and the draft's.
    """
    context = config.context_tokens
    draft = tiny_llama(vocab, 1, 7, dtypes[1], state_layers, context)
    head = draft.head
    draft.head = lambda x: head(x)[:, : vocab - 1]
    ids = torch.arange(vocab - 1)
    target = tiny_llama(vocab, 2, 3, dtypes[0], context=context)
    return TorchBackend(target, DraftModel(draft, ids), config, seed=seed)


def step(engine: Engine) -> StepOutcome:
    """Run a step that has something to do; the draft's blocks must add up behind it."""
    outcome = engine.step()
    assert outcome is not None
    engine.scheduler.draft.check()
    return outcome


class AnyPlan(Stateless):
    """Draws each row's proposer from `proposers` and its k from 0..k_max, anew every step."""

    name = "any"

    def __init__(
        self,
        proposers: tuple[Proposer, ...],
        k_max: int,
        seed: int = 0,
        stop_rule: StopRule | None = None,
        fixed_k: bool = False,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.proposers, self.k_max, self.fixed_k = np.asarray(proposers), k_max, fixed_k
        self.stop_rule = stop_rule or StopRule()

    def decide(self, view: BatchView) -> Plan:
        rows = len(view)
        k = (
            np.full(rows, self.k_max)
            if self.fixed_k
            else self.rng.integers(0, self.k_max + 1, rows)
        )
        return Plan(
            request_id=view.request_id,
            proposer=self.rng.choice(self.proposers, rows).astype(np.uint8),
            k=k.astype(np.int16),
            shadow=np.zeros(rows, bool),
            propensity=np.ones(rows, np.float32),
            reason=np.zeros(rows, np.uint8),
            stop_rule=self.stop_rule,
            step_id=view.step_id,
        )
