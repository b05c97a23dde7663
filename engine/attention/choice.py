"""Which attention a model gets: Triton's on CUDA where it is there, else SDPA."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from parlay.engine.attention.paged import Attention, PagedKV
from parlay.engine.attention.sdpa import SdpaAttention

VARIABLE = "PARLAY_ATTENTION"
INTERPRET = "TRITON_INTERPRET"


def choose_attention(device: torch.device) -> Callable[[PagedKV, int], Attention]:
    """Return what makes the attention of a cache on `device`, given it and the query heads.

    PARLAY_ATTENTION=triton or sdpa settles it. Raises ValueError where that is another word, or
    triton where it is not installed, or where neither CUDA nor TRITON_INTERPRET=1 runs it.
    """
    named, there = os.environ.get(VARIABLE, ""), find_spec("triton") is not None
    if named not in ("", "triton", "sdpa"):
        raise ValueError(f"{VARIABLE}={named}: set it to triton or sdpa, or leave it unset")
    if named == "sdpa" or (not named and not (there and device.type == "cuda")):
        return SdpaAttention
    if not there:
        raise ValueError(f"{VARIABLE}=triton: triton is not installed; pip install parlay[triton]")
    if device.type != "cuda" and os.environ.get(INTERPRET) != "1":
        raise ValueError(
            f"{VARIABLE}=triton on {device.type}: needs CUDA, or {INTERPRET}=1, which is for tests"
        )
    # The kernels are made for the interpreter or for a GPU as they are imported.
    from parlay.engine.attention.triton import TritonAttention

    return TritonAttention
