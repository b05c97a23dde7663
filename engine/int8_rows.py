"""Matrices on disk: int8 with a float16 scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor


def quantised(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [rows, columns] and float16 scales [rows] of a float matrix."""
    w = w.detach().float()
    scale = (w.abs().amax(1) / 127).clamp_min(1e-6).half()
    return (w / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def widened(rows: Tensor, scale: Tensor) -> Tensor:
    """Return the bfloat16 matrix of int8 rows and their scales."""
    return (rows.float() * scale.float()[:, None]).bfloat16()
