"""`parlay bench vllm`: one vLLM, as it drafts by itself at each length, and steered.

All ways take turns on one engine in this process, so that they meet the same machine.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from parlay.engine.demo.prompts import chat_prompts
from parlay.engine.demo.stats import ADAPTIVE
from parlay.engine.plugins.vllm import register
from parlay.policies.files import write_json

LENGTHS = (2, 4, 8)
_ENVIRONMENT = {
    "PARLAY": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


def bench_vllm(
    model: Annotated[Path | None, typer.Option(help="a folder; the default model if not given")] = (
        None
    ),
    rounds: Annotated[int, typer.Option(help="each way decodes all prompts so often")] = 3,
    prompts: Annotated[int, typer.Option(help="of each of the six tasks, 1 to 4")] = 2,
    tokens: Annotated[int, typer.Option(help="decoded a prompt")] = 64,
    concurrency: Annotated[str, typer.Option(help="requests at once")] = "1,4,12",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    policy: Annotated[str, typer.Option(help="what decides")] = "goodput",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Compare steered vLLM with vLLM's n-gram at fixed lengths and with none, greedily."""
    os.environ.update({**_ENVIRONMENT, "PARLAY_POLICY": policy})
    register()
    llm = _engine(model, dtype)
    asked = chat_prompts(llm.get_tokenizer(), prompts)
    rows = []
    for at_once in (int(part) for part in concurrency.split(",")):
        rows += _measure(llm, asked, at_once, tokens, rounds)
        typer.echo(_table(rows[-len(LENGTHS) - 2 :], at_once))
    if json_file is not None:
        write_json(json_file, {"rows": rows})


def _engine(model: Path | None, dtype: str) -> Any:
    if model is None:
        from parlay.engine.weights import default_model_dir

        model = default_model_dir()
    return importlib.import_module("vllm").LLM(
        model=str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": max(LENGTHS),
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    )


def _measure(
    llm: Any, asked: list[tuple[str, list[int]]], at_once: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row of each way at one concurrency; the first round only warms up."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    steering, most = scheduler.parlay, scheduler.num_spec_tokens
    if steering is None:
        raise typer.Exit(1)
    speeds: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for way, k, steered in _ways(most):
            # vLLM drafts so many tokens by itself; 0 is no speculation.
            scheduler.num_spec_tokens, scheduler.parlay = k, steering if steered else None
            steering.step_us.clear()
            steering.policy_us.clear()
            speeds.setdefault(way, []).append(_decode(llm, asked, at_once, tokens))
    scheduler.num_spec_tokens, scheduler.parlay = most, steering
    taken = {way: np.asarray(s[1:] or s) for way, s in speeds.items()}
    best = max((w for w in taken if w != ADAPTIVE), key=lambda w: _median(taken[w]))
    return [
        {
            "concurrency": at_once,
            "way": way,
            "tokens_per_s": _median(speed),
            "best_other": best,
            "ratio": _median(speed / taken[best]),
            "plugin_p50_us": _median(steering.step_us) if way == ADAPTIVE else 0.0,
            "policy_p50_us": _median(steering.policy_us) if way == ADAPTIVE else 0.0,
        }
        for way, speed in taken.items()
    ]


def _median(values: Any) -> float:
    return float(np.median(values))


def _ways(most: int) -> Iterator[tuple[str, int, bool]]:
    yield "none", 0, False
    yield from ((f"ngram-{k}", k, False) for k in LENGTHS)
    yield ADAPTIVE, most, True


def _decode(llm: Any, asked: list[tuple[str, list[int]]], at_once: int, tokens: int) -> float:
    """Return tokens a second over all prompts, so many at once."""
    params = importlib.import_module("vllm").SamplingParams
    start_s, made = time.perf_counter(), 0
    for i in range(0, len(asked), at_once):
        batch = asked[i : i + at_once]
        given = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        how = [params(**given, extra_args={"parlay_task": task}) for task, _ in batch]
        done = llm.generate([{"prompt_token_ids": ids} for _, ids in batch], how, use_tqdm=False)
        made += sum(len(one.outputs[0].token_ids) for one in done)
    return made / (time.perf_counter() - start_s)


def _table(rows: list[dict[str, Any]], at_once: int) -> str:
    lines = [f"{at_once} at once", f"{'way':14}{'tokens/s':>10}{'x best fixed':>14}"]
    lines += [f"{r['way']:14}{r['tokens_per_s']:10.1f}{r['ratio']:14.2f}" for r in rows]
    last = rows[-1]
    lines.append(
        f"adaptive is {last['ratio']:.2f}x {last['best_other']};"
        f" the plugin takes {last['plugin_p50_us']:.0f} us a step (median),"
        f" the policy {last['policy_p50_us']:.0f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(bench_vllm)
