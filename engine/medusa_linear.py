"""The quickest linear layer that this machine has for heads."""

from __future__ import annotations

import torch
from torch import Tensor

from parlay.engine.kernels import build
from parlay.engine.kernels.native import pack, packed_linear
from parlay.engine.linear import Linear, can_pack, make_linear


def quick_linear(weight: Tensor) -> Linear:
    """Return x [rows, in] -> [rows, out] for a weight [out, in], in its dtype on its device.

    Our own kernel where it fits (bfloat16, one CPU thread, an even width), else `make_linear`.
    """
    library = build.load() if _fits(weight) else None
    if library is None:
        return make_linear(weight, can_pack(weight.dtype, weight.device))
    (packed,) = pack(library, [weight.contiguous()])
    rows = len(weight)
    return lambda x: packed_linear(library, x, packed, rows)


def _fits(weight: Tensor) -> bool:
    cpu = weight.device.type == "cpu" and torch.get_num_threads() == 1
    return cpu and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0
