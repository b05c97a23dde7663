"""Tiny Medusa heads with random weights, and a backend that has them beside all else."""

from __future__ import annotations

import torch
from tests.tiny import CONFIG, CPU, tiny_llama, tiny_weights
from torch import Tensor

from parlay.engine.medusa_heads import Heads, HeadsConfig, PlainHeads, RootedHeads
from parlay.engine.scheduler import EngineConfig
from parlay.engine.torch_backend import DraftModel, TorchBackend

HEADS = 4


def rooted_config(vocab: int) -> HeadsConfig:
    return HeadsConfig(16, HEADS, (2, 1), (24, 12), (1, 2), vocab - 1, 1e-5)


def rooted_weights(config: HeadsConfig, seed: int = 5) -> dict[str, Tensor]:
    return tiny_weights(config.tensor_shapes(), torch.Generator().manual_seed(seed))


def tiny_heads(vocab: int, plain: bool = False) -> Heads:
    """Heads of tests.tiny's target; rooted ones do not know its last token."""
    if plain:
        rng = torch.Generator().manual_seed(6)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng) * 0.4

        blocks = [[(draw(16, 16), draw(16))] for _ in range(HEADS)]
        outputs = [draw(vocab, 16) for _ in range(HEADS)]
        return PlainHeads(blocks, outputs, 2, torch.float32, CPU)
    config = rooted_config(vocab)
    target = tiny_llama(vocab, 2, 3)
    head = torch.randn(vocab, 16, generator=torch.Generator().manual_seed(8))
    ids = torch.arange(vocab - 1)
    return RootedHeads(config, rooted_weights(config), target.embedding, head, ids)


def headed_backend(
    vocab: int = 5, seed: int = 0, config: EngineConfig = CONFIG, plain: bool = False
) -> TorchBackend:
    """Heads beside a draft model that reads other states of the target than they do."""
    draft = tiny_llama(vocab, 1, 7, state_layers=(1,))
    target = tiny_llama(vocab, 2, 3)
    drafter = DraftModel(draft, torch.arange(vocab))
    return TorchBackend(target, drafter, config, seed=seed, heads=tiny_heads(vocab, plain))
