"""`parlay bench vllm`: one vLLM, as it drafts by itself at each length, and steered.

All ways take turns on one engine in this process, so that they meet the same machine. So many
requests run at once, another beginning where one ends, until each prompt has been answered.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from parlay.engine.demo.prompts import chat_prompts
from parlay.engine.demo.stats import ADAPTIVE, NONE
from parlay.engine.plugins.vllm import register
from parlay.policies import DEFAULT_POLICY
from parlay.policies.files import write_json

LENGTHS = (2, 4, 8, 16)
WAYS = (NONE, *(f"ngram-{k}" for k in LENGTHS), ADAPTIVE)
_ENVIRONMENT = {
    "PARLAY": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
_FULL = 6
"""Each prompt is asked as often as it takes to keep a batch full for most of the time."""

Speeds = Mapping[int, Mapping[str, Sequence[float]]]
"""Tokens a second by requests at once, way and round."""


def bench_vllm(
    model: Annotated[Path | None, typer.Option(help="a folder; the default model if not given")] = (
        None
    ),
    rounds: Annotated[int, typer.Option(help="each way decodes all prompts so often")] = 3,
    prompts: Annotated[int, typer.Option(help="of each of the six tasks, 1 to 4")] = 2,
    tokens: Annotated[int, typer.Option(help="decoded a prompt")] = 64,
    concurrency: Annotated[str, typer.Option(help="requests at once")] = "1,4,16",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    policy: Annotated[str, typer.Option(help="what decides")] = DEFAULT_POLICY,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Compare steered vLLM with vLLM's n-gram at fixed lengths and with none, greedily."""
    os.environ.update({**environment(os.environ), "PARLAY_POLICY": policy})
    register()
    llm = _engine(model, dtype)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if scheduler.parlay is None:
        raise typer.Exit(1)
    asked = chat_prompts(llm.get_tokenizer(), prompts)
    random.Random(0).shuffle(asked)
    loads = [int(part) for part in concurrency.split(",")]
    speeds: dict[int, dict[str, list[float]]] = {n: {way: [] for way in WAYS} for n in loads}
    took: dict[int, tuple[list[float], list[float]]] = {n: ([], []) for n in loads}
    for done, at_once in itertools.product(range(rounds + 1), loads):
        repeated = asked * -(-_FULL * at_once // len(asked))
        for way, speed in _round(llm, scheduler, repeated, at_once, tokens, took[at_once]):
            typer.echo(f"round {done}, {at_once} at once, {way}: {speed:.1f} tokens/s", err=True)
            if done:  # the first only warms up
                speeds[at_once][way].append(speed)
    report = report_of(speeds)
    for row in report["rows"]:
        plugin, policy_us = took[row["concurrency"]]
        row["plugin_p50_us"], row["policy_p50_us"] = _median(plugin), _median(policy_us)
        row["plugin_mean_us"] = float(np.mean(plugin))
        row["policy_mean_us"] = float(np.mean(policy_us))
    typer.echo(_table(report))
    if json_file is not None:
        write_json(json_file, report)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that vLLM is to find beside those given."""
    # vLLM's n-gram runs on numba, which would give all that follows every core there is.
    threads = given.get("NUMBA_NUM_THREADS") or given.get("OMP_NUM_THREADS")
    return _ENVIRONMENT | ({"NUMBA_NUM_THREADS": threads} if threads else {})


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


def _round(
    llm: Any,
    scheduler: Any,
    asked: list[tuple[str, list[int]]],
    at_once: int,
    tokens: int,
    took: tuple[list[float], list[float]],
) -> Iterator[tuple[str, float]]:
    """Yield each way's tokens a second; adds to what plugin and policy took, in us a step."""
    steering, most = scheduler.parlay, scheduler.num_spec_tokens
    for way, k in zip(WAYS, (0, *LENGTHS, most), strict=True):
        # vLLM drafts so many tokens by itself; 0 is no speculation.
        scheduler.num_spec_tokens = k
        scheduler.parlay = steering if way == ADAPTIVE else None
        steering.step_us.clear()
        steering.policy_us.clear()
        yield way, _decode(llm.llm_engine, asked, at_once, tokens)
    took[0].extend(steering.step_us)
    took[1].extend(steering.policy_us)


def _decode(engine: Any, asked: list[tuple[str, list[int]]], at_once: int, tokens: int) -> float:
    """Return tokens a second over all prompts, so many at once."""
    params = importlib.import_module("vllm").SamplingParams
    given = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    coming, running, made = enumerate(asked), 0, 0
    start_s = time.perf_counter()
    while True:
        for number, (task, ids) in itertools.islice(coming, at_once - running):
            how = params(**given, extra_args={"parlay_task": task})
            engine.add_request(str(number), {"prompt_token_ids": ids}, how)
            running += 1
        if not running:
            return made / (time.perf_counter() - start_s)
        for one in engine.step():
            if one.finished:
                running -= 1
                made += len(one.outputs[0].token_ids)


def report_of(speeds: Speeds) -> dict[str, Any]:
    """Return a row a load with each way's median speed and ours over the best other; and over all
    loads, by geometric mean, ours and that of the best way of each load over the best single way.
    """  # noqa: D205
    rows: list[dict[str, Any]] = []
    for at_once, ways in speeds.items():
        medians = {way: _median(speed) for way, speed in ways.items()}
        best = max((w for w in medians if w != ADAPTIVE), key=medians.__getitem__)
        ratios = np.divide(ways[ADAPTIVE], ways[best])
        rows.append(
            {
                "concurrency": at_once,
                "tokens_per_s": medians,
                "best_other": best,
                "ratio": _median(ratios),
                "round_ratios": ratios.tolist(),
            }
        )
    means = {
        way: float(np.exp(np.mean([np.log(r["tokens_per_s"][way]) for r in rows])))
        for way in rows[0]["tokens_per_s"]
    }
    single = max((w for w in means if w != ADAPTIVE), key=means.__getitem__)
    tuned = np.exp(np.mean([np.log(r["tokens_per_s"][r["best_other"]]) for r in rows]))
    return {
        "rows": rows,
        "best_single": single,
        "ratio": means[ADAPTIVE] / means[single],
        "tuned_ratio": float(tuned) / means[single],
    }


def _median(values: Any) -> float:
    return float(np.median(values))


def _table(report: Mapping[str, Any]) -> str:
    rows = report["rows"]
    lines = ["tokens/s     " + "".join(f"{r['concurrency']:>9}" for r in rows)]
    for way in rows[0]["tokens_per_s"]:
        speeds = (f"{r['tokens_per_s'][way]:9.1f}" for r in rows)
        lines.append(f"{way:13}" + "".join(speeds))
    lines.append(f"{'x best other':13}" + "".join(f"{r['ratio']:9.2f}" for r in rows))
    for part in ("plugin", "policy"):
        for kind in ("p50", "mean"):
            times = "".join(f"{r[f'{part}_{kind}_us']:9.0f}" for r in rows)
            lines.append(f"{f'{part} us {kind}':13}{times}")
    lines.append(
        f"over all loads adaptive is {report['ratio']:.3f}x {report['best_single']}, the best"
        f" single way; the best way of each load is {report['tuned_ratio']:.3f}x"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(bench_vllm)
