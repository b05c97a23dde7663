"""Compiles the kernels for two generations of GPUs, ahead of time; it takes no GPU.

A script of its own: kernels are made for the interpreter or for a GPU as they are imported.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from parlay.engine.attention import triton_kernels as kernels
from parlay.engine.attention.triton import OPTIONS

CAPABILITIES = (80, 90)
LONGS = ("slots", "mask")
FLOATS = ("tops", "totals", "parts")
WORDS = ("table", "low", "base")
NUMBERS = ("tokens", "width", "token_stride", "head_stride", "layer_stride")


def compiled(kernel: Any, dtype: str, capability: int, **constants: Any) -> None:
    """Compile as if every pointer and stride were a multiple of 16, as they are in models."""
    names: list[str] = kernel.arg_names
    signature, aligned = dict[str, str](), dict[tuple[int, ...], list[list[object]]]()
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            words = name.startswith("tile_") or name in WORDS
            kind = "i64" if name in LONGS else "i32" if words else dtype
            signature[name] = "*" + ("fp32" if name in FLOATS else kind)
        if name not in constants and name not in ("scale", "tokens", "width"):
            aligned[i,] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(kernel, signature, values, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(OPTIONS))
    assert made.asm["cubin"]


def main() -> None:
    """Compile what a Llama of 8B launches, and a model whose heads are no power of two."""
    for dtype in ("bf16", "fp16", "fp32"):
        for capability in CAPABILITIES:
            model = {"HEADS": 32, "DIM": 128}
            block = {"DIM": 128, "BLOCK_D": 128}
            tiles = {"BLOCK_TOKENS": 16, "BLOCK_M": 16, "BLOCK_N": 32, "WIDEN": False}
            compiled(
                kernels.attend, dtype, capability,
                HEADS=32, SHARE=4, SPLITS=8, **block, **tiles,
            )  # fmt: skip
            compiled(
                kernels.attend, dtype, capability,
                HEADS=9, SHARE=3, SPLITS=1, DIM=80, BLOCK_D=128, **tiles,
            )  # fmt: skip
            compiled(kernels.append, dtype, capability, PARTS=16, WIDE=4096, BLOCK=1024, **model)
            compiled(kernels.reduce, dtype, capability, BLOCK_D=128, SPLITS=8, **model)
            for back in (False, True):
                compiled(
                    kernels.copy_slots, dtype, capability, PARTS=16, BLOCK_P=16, BACK=back, **block
                )
        print(dtype)


if __name__ == "__main__":
    main()
