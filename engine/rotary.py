"""The angles of rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from parlay.engine.model_config import ModelConfig


def rotary_angles(config: ModelConfig, positions: int, theta: float | None = None) -> Tensor:
    """Return f32 [positions, head_dim / 2]: position times theta^(-2i / head_dim).

    theta: the base, None the config's own.
    """
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    base = config.rope_theta if theta is None else theta
    return torch.outer(torch.arange(positions, dtype=torch.float32), base**-steps)
