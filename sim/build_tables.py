"""Rebuild the cost tables in `sim/data`: `PARLAY_DATA=... python -m parlay.sim.build_tables`.

Sources, by folder of PARLAY_DATA/latency: aiconfigurator_h200 (ai-dynamo/aiconfigurator,
Apache-2.0), vidur (microsoft/vidur, MIT), splitwise_sim (Mutinifni/splitwise-sim, MIT). The CPU
profile is this project's own measurement. Needs pandas, pyarrow and scipy; running needs none.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.types import Array
from parlay.sim import roofline
from parlay.sim.h200_tables import Gemm, Table, fit_roofline, h200_profile, rounded
from parlay.sim.roofline import GPUS, MODELS

pd: Any = import_module("pandas")
OUT = Path(__file__).parent / "data"


def main() -> None:
    """Write every table; raises SystemExit where PARLAY_DATA names no folder."""
    folder = Path(os.environ.get("PARLAY_DATA", "")) / "latency"
    if not folder.is_dir():
        sys.exit("PARLAY_DATA must name the folder of public data, which has latency/ in it")
    h200 = folder / "aiconfigurator_h200"
    gemm = Gemm(h200 / "h200_gemm_bf16_vllm0.24.csv")
    decode = pd.read_csv(h200 / "h200_decode_attention_bf16_vllm0.24.csv")
    fit = fit_roofline(gemm, decode, h200)
    _write("roofline", fit)
    if fit != roofline.fit():
        sys.exit("the roofline's constants changed: run once more, for tables that use them")
    _write("h200_8b", h200_profile(gemm, decode, fit))
    _write("cpu_smollm", cpu_profile())
    for gpu, model, file, tp in (
        ("a100", "llama-3.1-8b", "a100_meta-llama_Meta-Llama-3-8B", 1),
        ("a100", "llama-2-7b", "a100_meta-llama_Llama-2-7b-hf", 1),
        ("h100", "llama-2-7b", "h100_meta-llama_Llama-2-7b-hf", 1),
        ("h100", "llama-2-70b", "h100_meta-llama_Llama-2-70b-hf", 4),
    ):
        table = pd.read_csv(folder / "vidur" / f"{file}_mlp.csv")
        _write(f"vidur_{gpu}_{_short(model)}", vidur_profile(table, gpu, model, tp))
    perf = pd.read_csv(folder / "splitwise_sim" / "perf_model.csv")
    for gpu, hardware in (("a100", "a100-80gb"), ("h100", "h100-80gb")):
        _write(f"splitwise_{gpu}_llama2_70b", splitwise_profile(perf, gpu, hardware, 4))


_CPU_GRID = (
    (1, (1.00, 1.10, 1.09, 1.17)),
    (2, (1.03, 1.10, 1.10, 1.15)),
    (4, (1.07, 1.13, 1.19, 1.29)),
    (8, (1.13, 1.26, 1.35, 1.68)),
    (16, (1.37, 1.52, 1.85, 2.51)),
    (32, (1.74, 2.21, 2.81, 3.71)),
)
"""Step time of SmolLM2-135M against one token, by batch, at 1, 2, 4, 8 rows each, context 128."""


def cpu_profile() -> dict[str, Any]:
    """Return the default model on one CPU core: 9.1 ms, .51 ms a row, and its context.

    What a KV token takes against a row is from the grid, measured without prepacked weights.
    """
    cells = [
        (b, b * q, r) for b, line in _CPU_GRID for q, r in zip((1, 2, 4, 8), line, strict=True)
    ]
    batch, rows, ratio = np.array(cells).T
    x = np.stack([np.ones(len(rows)), rows, 128 * batch], 1) / ratio[:, None]
    _, row, kv = np.linalg.lstsq(x, np.ones(len(rows)), rcond=None)[0]
    row_ms, kv_ms = 0.51, 0.51 * kv / row
    return {
        "source": "SmolLM2-135M bf16 on one core with AMX, measured with this project's engine: "
        "9.1 ms a pass and .51 ms a row with prepacked weights; KV in proportion to a row as in "
        "the batch x rows grid; draft of 2 layers 1.7 ms at 1 row, 4.3 ms at 32; Medusa heads a "
        "seventh of a pass",
        "licence": "Apache-2.0",
        "bucket_edges": [],
        "off_edge_factor": 1.0,
        "overhead_ms": 0.0,
        "draft_pass_ms": 0.0,
        "medusa": {"fixed_ms": rounded(9.1 / 7), "row_ms": rounded(row_ms / 7)},
        "ngram": roofline.DRAFTING["ngram"],
        "target": _linear(9.1, row_ms, float(kv_ms)),
        "draft": _linear(1.7 - 2.6 / 31, 2.6 / 31, float(kv_ms) / 15),
    }


def _linear(fixed_ms: float, row_ms: float, kv_ms: float) -> dict[str, Any]:
    return {
        "tokens": [1, 512],
        "ms": [rounded(fixed_ms + row_ms), rounded(fixed_ms + 512 * row_ms)],
        **_kv_only(kv_ms),
    }


def _kv_only(kv_ms: float) -> dict[str, Any]:
    grid = [[0.0, 0.0], [0.0, rounded(kv_ms * 1024 * 8192)]]
    attention = {"requests": [0, 1024], "context_tokens": [0, 8192], "ms": grid}
    return {"attention": attention, "row_context_ms": 0.0}


def vidur_profile(table: Table, gpu: str, model: str, tp: int) -> dict[str, Any]:
    """Return vidur's layer times by tokens, with our roofline's output layer and attention."""
    shape, machine = MODELS[model], GPUS[gpu]
    table = table[table.num_tensor_parallel_workers == tp]
    columns = [c for c in table.columns if c.endswith(".median")]
    median = table.groupby("num_tokens")[columns].median()
    embed = median.pop("time_stats.emb.median")
    layer = median.sum(axis=1) + median["time_stats.add.median"]
    tokens = np.array([t for t in median.index if t <= 512 or t % 512 == 0])
    reduced = [roofline.all_reduce_ms(machine, tp, t * shape.hidden * 2) for t in tokens]
    head = [roofline.head_ms(machine, shape, tp, int(t)) for t in tokens]
    ms = shape.layers * (layer[tokens].to_numpy() + 2 * np.array(reduced))
    ms = ms + embed[tokens].to_numpy() + np.array(head)
    profile = roofline.roofline(gpu, model, "", tp)
    target = {"tokens": tokens.tolist(), "ms": [rounded(v) for v in _rising(ms)]}
    source = f"microsoft/vidur's layer times of {model} on {tp} {gpu}; output layer, attention, "
    return _simple(profile) | {
        "source": source + "all-reduce and the draft model by this project's roofline",
        "licence": "MIT",
        "target": target | roofline.attention_profile(machine, shape, tp),
    }


def splitwise_profile(perf: Table, gpu: str, hardware: str, tp: int) -> dict[str, Any]:
    """Return splitwise's 70B: decode steps to 32 tokens, prompts from 128, end to end."""
    perf = perf[(perf.model == "llama2-70b") & (perf.hardware == hardware)]
    perf = perf[perf.tensor_parallel == tp]
    steps = perf[(perf.prompt_size == 512) & (perf.batch_size <= 32)]
    prompts = perf[(perf.batch_size == 1)].groupby("prompt_size").prompt_time.median()
    by_batch = steps.groupby("batch_size").token_time.median()
    tokens = np.array([*by_batch.index, *prompts.index])
    context = perf[perf.batch_size == 1].groupby("prompt_size").token_time.median()
    kv_ms = max(float(np.polyfit(context.index, context, 1)[0]), 0.0)
    kv_read = np.array([*(512 * by_batch.index), *(0 * prompts.index)]) * kv_ms
    ms = _rising(np.array([*by_batch, *prompts]) - kv_read)
    source = "Mutinifni/splitwise-sim's medians of llama2-70b on "
    return _simple(roofline.roofline(gpu, "llama-2-70b", "", tp)) | {
        "source": f"{source}{tp} {hardware}, host time included; draft model by roofline",
        "licence": "MIT",
        "bucket_edges": [],
        "overhead_ms": 0.0,
        "target": {"tokens": tokens.tolist(), "ms": [rounded(v) for v in ms], **_kv_only(kv_ms)},
    }


def _simple(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a roofline's profile with its draft's curve thinned: between points it is smooth."""
    draft = dict(profile["draft"])
    keep = [i for i, t in enumerate(draft["tokens"]) if t in (1, 2, 4) or t % 8 == 0]
    for key in ("tokens", "ms"):
        draft[key] = [rounded(draft[key][i]) for i in keep]
    return profile | {"draft": draft}


def _rising(ms: Array) -> Array:
    return np.maximum.accumulate(ms)


def _short(model: str) -> str:
    return model.replace("llama-", "llama").replace("3.1", "3").replace("-", "_")


def _write(name: str, table: dict[str, Any]) -> None:
    """Write one key a line, so that a changed figure shows as one changed line."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    (OUT / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
