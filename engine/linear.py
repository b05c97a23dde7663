"""Linear layers: prepacked for oneDNN on a CPU, plain elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]

PACK_ROWS = 16
"""Rows the packed layout is chosen for: a few requests with a few drafts each."""
TILE_ROWS = 16
"""Rows of a product where its bits must not depend on the batch."""


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


def tiled(linear: Linear, width: int, dtype: torch.dtype, device: torch.device) -> Linear:
    """Return `linear` run on TILE_ROWS rows at a time: a row has the same bits in every batch.

    width: of a row. Raises ValueError where on this machine its place in the tile matters even so.
    """

    def run(x: Tensor) -> Tensor:
        rows = len(x)
        filled = F.pad(x, (0, 0, 0, -rows % TILE_ROWS))
        return torch.cat([linear(tile) for tile in filled.split(TILE_ROWS)])[:rows]

    row = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    alone = linear(F.pad(row[None], (0, 0, 0, TILE_ROWS - 1)))[0]
    crowd = linear(row.expand(TILE_ROWS, -1).contiguous())
    if not torch.equal(crowd, alone.expand_as(crowd)):
        raise ValueError(
            "batch_invariant: this machine's matrix products round a row by its place; leave it off"
        )
    return run
