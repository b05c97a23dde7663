"""Step time from a GPU's published peaks: the longer of arithmetic and memory, matrix by matrix.

t = (arithmetic^p + memory^p)^(1/p) + launch for each matrix of a layer. The shares of the peaks
that kernels reach, p and the launch time are fitted once on measured H200 GEMMs (`build_tables.py`)
and used for every GPU; all-reduce is latency + bytes / rate, fitted on H200 NVLink. Beside matrices
and attention a pass moves each token through norms, rotary, gate and sampling (`moved_ms`). The
idea is that of Williams et al., "Roofline" (2009).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

_Shape = TypeVar("_Shape")

GRAPH_EDGES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""CUDA-graph sizes that vLLM captures by default."""
HOST_MS = 1.2
DRAFTING = {
    "draft_pass_ms": 0.3,
    "medusa": {"fixed_ms": 0.35, "row_ms": 0.002},
    "ngram": {"fixed_ms": 0.05, "row_ms": 0.001},
}
"""What drafting takes beside the draft model's own rows; four Medusa heads."""
PASS_MS = 0.12
"""A pass of a drafting head beside its matrices: what they leave of vLLM 32374's .74 ms."""
_BYTES = 2
_LOGIT_BYTES = 18
"""A logit is read, cast to 4 bytes, softmaxed and searched for the largest."""
_MOVED_SHARE = 0.6
"""Of the memory rate, for kernels that only move: the least that Microsoft Vidur's layer times of
norms, rotary, gate and sums leave on an H100 (.60 to .75), somewhat more than on an A100 (.5)."""
_CURVE = (*range(1, 65), *range(68, 129, 4), *range(136, 513, 8), *range(576, 2049, 64))
_CURVE_END = (3072, 4096, 6144, 8192, 16384, 32768)


@dataclass(slots=True, frozen=True)
class Gpu:
    """A GPU's dense bf16 peak, memory rate and NVLink rate, from NVIDIA's data sheets."""

    tflops: float
    memory_tb_s: float
    nvlink_gb_s: float


GPUS = {
    "a100": Gpu(312.0, 2.039, 600.0),
    "gh200": Gpu(989.0, 4.0, 900.0),
    "h100": Gpu(989.0, 3.35, 900.0),
    "h20": Gpu(148.0, 4.0, 900.0),
    "h200": Gpu(989.0, 4.8, 900.0),
}
"""SXM modules; A100 with 80 GB, GH200 with 96 GB of HBM3."""


@dataclass(slots=True, frozen=True)
class Model:
    """A transformer's shape, from its published configuration.

    ffn: width of the (gated) feed-forward net, of one expert where there are `experts`, of which
    each token takes `active`. fusion: width of what a drafting head's first layer takes in, 0 none.
    draft: the model that drafts for it unless another is named.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    active: int = 0
    fusion: int = 0
    draft: str = "llama-3.2-1b"


MODELS = {
    "llama-2-7b": Model(32, 4096, 32, 32, 128, 11008, 32000),
    "llama-2-70b": Model(80, 8192, 64, 8, 128, 28672, 32000),
    "llama-3.1-8b": Model(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": Model(80, 8192, 64, 8, 128, 28672, 128256),
    "llama-3.2-1b": Model(16, 2048, 32, 8, 64, 8192, 128256),
    "qwen2.5-7b": Model(28, 3584, 28, 4, 128, 18944, 152064, draft="qwen2.5-0.5b"),
    "qwen2.5-0.5b": Model(24, 896, 14, 2, 64, 4864, 151936),
    "qwen3-30b-a3b": Model(48, 2048, 32, 4, 128, 768, 151936, experts=128, active=8),
    "qwen3-235b-a22b": Model(94, 4096, 64, 4, 128, 1536, 151936, experts=128, active=8),
    "eagle-llama-3.1-8b": Model(1, 4096, 32, 8, 128, 14336, 128256, fusion=8192),
    "eagle3-llama-3.1-8b": Model(1, 4096, 32, 8, 128, 14336, 32000, fusion=12288),
    "eagle3-qwen3-235b-a22b": Model(1, 4096, 64, 4, 128, 12288, 32000, fusion=12288),
}


def distinct_experts(tokens: float, experts: int, active: int) -> float:
    """Return how many of `experts` a pass touches, where each token takes `active` at random."""
    return float(experts * (1.0 - (1.0 - active / experts) ** tokens))


def roofline(
    gpu: str, model: str, draft: str = "", tp: int = 1, draft_tp: int = 1
) -> dict[str, Any]:
    """Return the cost profile of `model` on `tp` GPUs, the draft model (its own usual one) on some.

    draft_tp: how many of the same GPUs run the draft; the two take turns. Raises ValueError for a
    name that is not in GPUS or MODELS, or a degree that does not divide the heads or has no
    all-reduce fit (1, 2, 4, 8).
    """
    machine, shape = _known("GPU", gpu, GPUS), _known("model", model, MODELS)
    name = draft or shape.draft
    drafter = _known("model", name, MODELS)
    _check_degree("tp", tp, model, shape)
    _check_degree("draft_tp", draft_tp, name, drafter)
    beside = f" on {draft_tp}" if draft_tp > 1 else ""
    return {
        "source": f"roofline of {model} on {tp} {gpu}, {name}{beside} drafts",
        "bucket_edges": [] if shape.experts else list(GRAPH_EDGES),
        "off_edge_factor": 1.0,
        "overhead_ms": HOST_MS,
        "target": _whole_pass(machine, shape, tp),
        "draft": _whole_pass(machine, drafter, draft_tp),
        **DRAFTING,
        "draft_pass_ms": PASS_MS,
    }


def _whole_pass(gpu: Gpu, model: Model, tp: int) -> dict[str, Any]:
    """Return `pass_profile` and what it leaves out, as our measured tables do."""
    profile = pass_profile(gpu, model, tp)
    pairs = zip(profile["tokens"], profile["ms"], strict=True)
    return profile | {"ms": [ms + moved_ms(gpu, model, tp, tokens) for tokens, ms in pairs]}


def moved_ms(gpu: Gpu, model: Model, tp: int, tokens: int) -> float:
    """Return what kernels beside matrices and attention take: their bytes at the memory rate.

    Two norms that also add, each read and written twice; rotary, reading and writing queries and
    keys and writing KV; the gate, of two halves one; in a mixture the sum over a token's experts.
    """
    width, kv = model.heads * model.head_dim / tp, max(model.kv_heads / tp, 1.0) * model.head_dim
    layer = 8 * model.hidden + 2 * (width + kv) + 4 * kv
    layer += 3 * model.ffn / tp * max(model.active, 1) + model.active * model.hidden
    size = tokens * (_BYTES * model.layers * layer + _LOGIT_BYTES * model.vocab / tp)
    return 1e-9 * size / (gpu.memory_tb_s * _MOVED_SHARE)


def _check_degree(option: str, degree: int, name: str, shape: Model) -> None:
    if degree != 1 and (str(degree) not in fit()["all_reduce"] or shape.heads % degree):
        raise ValueError(
            f"{option}={degree} must be 1, 2, 4 or 8 and divide {name}'s {shape.heads} heads"
        )


def pass_profile(gpu: Gpu, model: Model, tp: int) -> dict[str, Any]:
    """Return the profile of one pass of `model`: its curve over rows and its attention grid."""
    tokens = list(range(1, 513)) if model.experts else list(_CURVE)
    tokens += [t for t in (*_CURVE, *_CURVE_END) if t > tokens[-1]]

    def ms(rows: int) -> float:
        layers, head = layers_ms(gpu, model, tp, rows), head_ms(gpu, model, tp, rows)
        return layers + head + ends_ms(gpu, model, tp, rows)

    return {
        "tokens": tokens,
        "ms": [ms(t) for t in tokens],
        **attention_profile(gpu, model, tp),
    }


def attention_profile(gpu: Gpu, model: Model, tp: int) -> dict[str, Any]:
    """Return the profile of attention: reading KV at the memory rate, plus a launch a layer."""
    found = fit()
    kv_bytes = 2 * max(model.kv_heads / tp, 1.0) * model.head_dim * _BYTES * model.layers
    kv_ms = 1e-9 * kv_bytes / (gpu.memory_tb_s * found["kv_share"])
    launch = found["attention_launch_ms"] * model.layers
    requests, context = [0, 4096], [0, 131072]
    flops = 4 * model.heads * model.head_dim * model.layers / tp
    return {
        "attention": {
            "requests": requests,
            "context_tokens": context,
            "ms": [[launch + r * c * kv_ms for c in context] for r in requests],
        },
        "row_context_ms": 1e-9 * flops / (gpu.tflops * found["attention_flops_share"]),
    }


def layers_ms(gpu: Gpu, model: Model, tp: int, tokens: int) -> float:
    """Return the time of every layer's matrices, and its two all-reduces, for `tokens` rows."""
    h, width = model.hidden, model.heads * model.head_dim
    qkv = width + 2 * max(model.kv_heads, tp) * model.head_dim
    layer = _matrix_ms(gpu, tokens, h, qkv / tp) + _matrix_ms(gpu, tokens, width / tp, h)
    if model.experts:
        touched = distinct_experts(tokens, model.experts, model.active)
        rows = tokens * model.active
        layer += _matrix_ms(gpu, tokens, h, model.experts)
        layer += _matrix_ms(gpu, rows, h, 2 * model.ffn / tp, touched)
        layer += _matrix_ms(gpu, rows, model.ffn / tp, h, touched)
    else:
        layer += _matrix_ms(gpu, tokens, h, 2 * model.ffn / tp)
        layer += _matrix_ms(gpu, tokens, model.ffn / tp, h)
    layer += 2 * all_reduce_ms(gpu, tp, tokens * h * _BYTES)
    fused = _matrix_ms(gpu, tokens, model.fusion, h) if model.fusion else 0.0
    return model.layers * layer + fused


def head_ms(gpu: Gpu, model: Model, tp: int, tokens: int) -> float:
    """Return the time of the output layer for `tokens` rows."""
    return _matrix_ms(gpu, tokens, model.hidden, model.vocab / tp)


def ends_ms(gpu: Gpu, model: Model, tp: int, tokens: int) -> float:
    """Return what it takes to have the input of `tokens` rows on every GPU and the logits on one.

    The input is summed like a layer's output, from an embedding that is shared out. A gather of the
    logits moves half of what summing them would, in a ring.
    """
    summed = all_reduce_ms(gpu, tp, tokens * model.hidden * _BYTES)
    return summed + all_reduce_ms(gpu, tp, tokens * model.vocab * _BYTES) / 2.0


def all_reduce_ms(gpu: Gpu, tp: int, size: float) -> float:
    """Return the time to sum `size` bytes over `tp` GPUs; 0 on one."""
    if tp == 1:
        return 0.0
    latency, byte_ms = fit()["all_reduce"][str(tp)]
    return float(latency + byte_ms * size * GPUS["h200"].nvlink_gb_s / gpu.nvlink_gb_s)


def _matrix_ms(gpu: Gpu, rows: float, k: float, n: float, copies: float = 1.0) -> float:
    """Return the time of [rows, k] x [k, n], whose weights are `copies` matrices."""
    found = fit()
    arithmetic = 2e-9 * rows * k * n / (gpu.tflops * found["flops_share"])
    size = _BYTES * (copies * k * n + rows * (k + n))
    memory = 1e-9 * size / (gpu.memory_tb_s * found["memory_share"])
    p = found["p"]
    return float((arithmetic**p + memory**p) ** (1.0 / p) + found["launch_ms"])


@cache
def fit() -> dict[str, Any]:
    """Return the fitted constants of `data/roofline.json`."""
    text = files("parlay.sim").joinpath("data/roofline.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _known(kind: str, name: str, among: Mapping[str, _Shape]) -> _Shape:
    if name not in among:
        raise ValueError(f"no {kind} '{name}'; there are {', '.join(sorted(among))}")
    return among[name]
