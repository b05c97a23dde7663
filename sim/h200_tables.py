"""What `build_tables.py` makes of aiconfigurator's H200 measurements (Apache-2.0).

A model's step composed from GEMM and attention times, and the constants of the roofline.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.types import Array
from parlay.sim import roofline
from parlay.sim.roofline import GPUS, MODELS, Model

pd: Any = import_module("pandas")
minimize: Any = import_module("scipy.optimize").minimize
Table = Any
"""A pandas DataFrame; pandas brings no types."""


class Gemm:
    """Measured GEMM times by (m, n, k); between sizes linear in n or k, beyond the last n ditto."""

    def __init__(self, path: Path) -> None:
        table = pd.read_csv(path).groupby(["m", "n", "k"]).latency_ms.median().unstack("m")
        self.rows = np.asarray(table.columns, float)
        self._ms = {key: table.loc[key].to_numpy() for key in table.index if table.loc[key].all()}
        self._n = np.unique([n for n, _ in self._ms])

    def curve(self, n: int, k: int) -> Array:
        """Return ms [rows] of [m, k] x [k, n]."""
        if n > self._n[-1]:
            return self._at(int(self._n[-1]), k) * (n / float(self._n[-1]))
        high = int(self._n[np.searchsorted(self._n, n)])
        if high == n:
            return self._at(n, k)
        low = int(self._n[np.searchsorted(self._n, n) - 1])
        part = (n - low) / (high - low)
        return (1 - part) * self._at(low, k) + part * self._at(high, k)

    def _at(self, n: int, k: int) -> Array:
        known = sorted(size for width, size in self._ms if width == n)
        columns = np.stack([self._ms[n, size] for size in known])
        return np.array([np.interp(k, known, column) for column in columns.T])

    def model(self, model: Model) -> Array:
        """Return ms [rows] of all matrices of a dense model."""
        times = [count * self.curve(n, k) for n, k, count in matrices(model)]
        return np.asarray(np.sum(times, axis=0))


def matrices(model: Model) -> list[tuple[int, int, int]]:
    """Return (n, k, how many) of a dense model's matrices, the output layer last."""
    h, width, layers = model.hidden, model.heads * model.head_dim, model.layers
    qkv = width + 2 * model.kv_heads * model.head_dim
    layer = [(qkv, h), (h, width), (2 * model.ffn, h), (h, model.ffn)]
    return [(n, k, layers) for n, k in layer] + [(model.vocab, h, 1)]


def attention_table(decode: Table, model: Model) -> tuple[list[int], list[int], Array]:
    """Return (requests, context, ms [requests, context]) of one layer's decode attention.

    Cells beyond what was measured are filled at the rate of the row's last two cells, or of 64
    requests at 4-8k where that is slower.
    """
    chosen = decode[
        (decode.num_heads == model.heads)
        & (decode.num_key_value_heads == model.kv_heads)
        & (decode.head_dim == model.head_dim)
    ]
    pivot = chosen.pivot_table(index="batch_size", columns="context_len", values="latency_ms")
    requests, context = np.asarray(pivot.index), np.asarray(pivot.columns)
    ms = pivot.to_numpy().copy()
    usual = (pivot.loc[64, 8191] - pivot.loc[64, 4095]) / (64 * 4096)
    for row, count in zip(ms, requests, strict=True):
        last = int(np.flatnonzero(np.isfinite(row))[-1])
        rate = (row[last] - row[last - 1]) / (count * (context[last] - context[last - 1]))
        beyond = count * (context[last + 1 :] - context[last])
        row[last + 1 :] = row[last] + beyond * max(rate, usual)
    return [int(r) for r in requests], [int(c) for c in context], ms


def fit_roofline(gemm: Gemm, decode: Table, folder: Path) -> dict[str, Any]:
    """Return the constants of `roofline.py`, and the error that is left on what they fit.

    Shares of the peaks and p by least squared log error on Llama-3.1-8B's matrices, 1-8192 rows;
    the launch is aiconfigurator's own 3 us.
    """
    model, gpu, launch_ms = MODELS["llama-3.1-8b"], GPUS["h200"], 0.003
    curve = gemm.model(model)
    used = gemm.rows <= 8192
    rows, measured = gemm.rows[used], curve[used]

    def error(x: Array) -> Array:
        memory_share, flops_share, p = x
        total = np.zeros(len(rows))
        for n, k, count in matrices(model):
            flops = 2e-9 * rows * n * k / (gpu.tflops * flops_share)
            memory = 2e-9 * (n * k + rows * (n + k)) / (gpu.memory_tb_s * memory_share)
            total += count * ((flops**p + memory**p) ** (1.0 / p) + launch_ms)
        return np.log(total / measured)

    best = minimize(
        lambda x: float((error(x) ** 2).mean()),
        np.array([0.8, 0.7, 4.0]),
        method="Nelder-Mead",
        bounds=[(0.3, 1.0), (0.3, 1.0), (1.0, 16.0)],
    )
    left = error(best.x)
    memory_share, flops_share, p = (rounded(value) for value in best.x)
    return {
        "source": "fitted on ai-dynamo/aiconfigurator's H200 tables (vLLM 0.24, NCCL 2.29)",
        "licence": "Apache-2.0",
        "launch_ms": launch_ms,
        "memory_share": memory_share,
        "flops_share": flops_share,
        "p": p,
        **_fit_attention(decode, folder),
        "all_reduce": _fit_all_reduce(folder),
        "left_error": {"rms": rounded(np.sqrt((left**2).mean())), "max": rounded(abs(left).max())},
    }


def _fit_attention(decode: Table, folder: Path) -> dict[str, float]:
    """Return KV's share of the memory rate, a layer's launch, and prefill's share of the peak."""
    model, gpu = MODELS["llama-3.1-8b"], GPUS["h200"]
    requests, context, ms = attention_table(decode, model)
    kv_bytes = 2 * model.kv_heads * model.head_dim * 2
    rate = (ms[requests.index(64), context.index(8191)] - ms[requests.index(64), 0]) / (64 * 8190)
    prefill = pd.read_parquet(folder / "attention_vllm_0.24.0_context_attention_perf.parquet")
    prefill = prefill[
        (prefill.num_heads == model.heads)
        & (prefill.num_key_value_heads == model.kv_heads)
        & (prefill.head_dim == model.head_dim)
        & (prefill.kv_cache_dtype == "bfloat16")
        & (prefill.window_size == 0)
        & (prefill.batch_size == 1)
        & prefill.isl.isin([4096, 8192, 16384])
    ]
    pairs = prefill.isl.to_numpy(float) ** 2 / 2
    flops = 4e-9 * model.heads * model.head_dim * pairs / prefill.latency.to_numpy()
    return {
        "kv_share": rounded(kv_bytes * 1e-9 / rate / gpu.memory_tb_s),
        "attention_launch_ms": rounded(ms[0, 0]),
        "attention_flops_share": rounded(np.median(flops) / gpu.tflops),
    }


def _fit_all_reduce(folder: Path) -> dict[str, list[float]]:
    """Return (latency ms, ms a byte) by GPUs: least relative squares up to 16 MiB.

    The faster of vLLM's own all-reduce in a CUDA graph and NCCL's at each size.
    """
    own = pd.read_parquet(folder / "comm_vllm_0.24.0_custom_allreduce_perf.parquet")
    own = own[own.backend == "vllm_graph"]
    nccl = pd.read_parquet(folder / "comm_nccl_2.29.2_nccl_perf.parquet")
    nccl = nccl[(nccl.op_name == "all_reduce") & (nccl.nccl_dtype == "half")]
    both = pd.concat([own, nccl])
    fits = {}
    for gpus, table in both.groupby("num_gpus"):
        best = table.groupby("message_size").latency.min()
        best = best[best.index <= 1 << 24]
        size, ms = np.asarray(best.index, float), best.to_numpy()
        x = np.stack([1 / ms, size / ms], 1)
        latency, byte_ms = np.linalg.lstsq(x, np.ones(len(ms)), rcond=None)[0]
        fits[str(gpus)] = [rounded(latency), rounded(byte_ms)]
    return fits


def h200_profile(gemm: Gemm, decode: Table, fit: dict[str, Any]) -> dict[str, Any]:
    """Return Llama-3.1-8B with Llama-3.2-1B on an H200: GEMMs and decode attention, composed."""
    share = float(fit["attention_flops_share"])
    return {
        "source": "composed from ai-dynamo/aiconfigurator's H200 bf16 tables (vLLM 0.24): GEMMs "
        "by rows, decode attention by requests and context; Llama-3.1-8B, drafts Llama-3.2-1B. "
        "The host's time, a draft pass's .3 ms, Medusa and n-gram are this project's settings",
        "licence": "Apache-2.0",
        "bucket_edges": list(roofline.GRAPH_EDGES),
        "off_edge_factor": 1.0,
        "overhead_ms": roofline.HOST_MS,
        **roofline.DRAFTING,
        "target": _composed(gemm, decode, MODELS["llama-3.1-8b"], share),
        "draft": _composed(gemm, decode, MODELS["llama-3.2-1b"], share),
    }


def _composed(gemm: Gemm, decode: Table, model: Model, share: float) -> dict[str, Any]:
    curve = gemm.model(model)
    requests, context, ms = attention_table(decode, model)
    flops = 4e-9 * model.heads * model.head_dim * model.layers
    return {
        "tokens": [int(m) for m in gemm.rows],
        "ms": [rounded(value, 5) for value in curve],
        "attention": {
            "requests": requests,
            "context_tokens": context,
            "ms": [[rounded(value, 5) for value in row] for row in model.layers * ms],
        },
        "row_context_ms": rounded(flops / (share * GPUS["h200"].tflops)),
    }


def rounded(value: Any, digits: int = 4) -> float:
    """Return a figure to so many digits, as the tables carry it."""
    return float(f"{float(value):.{digits}g}")
