"""The quickest linear layer that this machine has for heads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from parlay.engine.kernels import build
from parlay.engine.kernels.native import PANEL
from parlay.engine.linear import Linear, can_pack, make_linear


def quick_linear(weight: Tensor) -> Linear:
    """Return x [rows, in] -> [rows, out] for a weight [out, in], in its dtype on its device.

    Our own kernel where it fits (bfloat16, one CPU thread, an even width), else `make_linear`.
    """
    library = build.load() if _fits(weight) else None
    if library is None:
        return make_linear(weight, can_pack(weight.dtype, weight.device))
    return _native(library, weight.contiguous())


def _fits(weight: Tensor) -> bool:
    cpu = weight.device.type == "cpu" and torch.get_num_threads() == 1
    return cpu and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0


def _native(library: ctypes.CDLL, weight: Tensor) -> Linear:
    out, width = weight.shape
    packed = torch.empty(-(-out // PANEL) * PANEL * width, dtype=torch.bfloat16)
    assert packed.data_ptr() % 64 == 0, "torch aligns its memory to cache lines"
    library.parlay_pack(_at(weight), _at(packed), ctypes.c_int64(out), ctypes.c_int64(width))

    def linear(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty(len(x), out, dtype=torch.bfloat16)
        sizes = map(ctypes.c_int64, (len(x), out, width))
        library.parlay_linear(_at(x), _at(packed), _at(y), *sizes)
        return y

    return linear


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
