"""Linear layers: prepacked for oneDNN on a CPU, plain elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]

PACK_ROWS = 16
"""Rows the packed layout is chosen for: a few requests with a few drafts each."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether this machine runs prepacked linears of this dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (
        dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def make_linear(weight: Tensor, pack: bool, bias: Tensor | None = None) -> Linear:
    """Return x [rows, in] -> [rows, out] for a weight [out, in] and a bias [out], if any.

    Packed weights are copied.
    """
    if not pack:
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda x: linear(x, packed, bias, "none", [], "")
