"""vLLM as a peer of `parlay bench engine`: a process of its own environment, asked in JSON lines.

This file runs by its path under vLLM's Python, where parlay need not be: it imports nothing of ours
and, beyond the standard library, only vLLM. A line of settings comes first and is answered when the
engine is up; then each line is a load.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
DecodeJob = Callable[[Json], Json]

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
"""vLLM's documentation shows its n-gram so."""


def serve(open_engine: Callable[[Json], tuple[Json, DecodeJob]]) -> None:
    """Answer standard input line by line until it ends; an error is the last answer.

    open_engine: settings -> (what to say of itself, what decodes a load).
    """
    # Engines print to standard output: it becomes standard error, and answers keep the old one.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: Json) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        about, decode = open_engine(json.loads(sys.stdin.readline()))
        tell({"ready": about})
        for line in sys.stdin:
            tell(decode(json.loads(line)))
    except Exception as error:
        tell({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        raise


def open_vllm(settings: Json) -> tuple[Json, DecodeJob]:
    """Start vLLM in this process and on so many threads; return what decodes a load.

    settings: model, dtype, threads, mode ("none" or "ngram"), context_tokens, max_running (requests
    at once) and kv_bytes.
    """
    os.environ.update(
        PARLAY="0",  # nobody steers it, even where our plugin is installed
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=str(settings["threads"]),
        # Its n-gram runs on numba, which would give all that follows every core there is.
        NUMBA_NUM_THREADS=str(settings["threads"]),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
    )
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context_tokens"],
        max_num_seqs=settings["max_running"],
        kv_cache_memory_bytes=settings["kv_bytes"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        speculative_config=dict(NGRAM) if settings["mode"] == "ngram" else None,
    )
    engine = llm.llm_engine

    def decode(job: Json) -> Json:
        return _closed_loop(engine, job, vllm)

    return {"version": vllm.__version__}, decode


def _closed_loop(engine: Any, job: Json, vllm: Any) -> Json:
    """Decode greedily, a request coming in as one ends; times in seconds since its arrival."""
    prompts, lengths = job["prompts"], job["lengths"]
    waiting, live = list(range(len(prompts)))[::-1], 0
    added, first, last, tokens = ([0.0] * len(prompts) for _ in range(4))
    delta = vllm.sampling_params.RequestOutputKind.DELTA
    start_s = time.perf_counter()
    while waiting or live:
        while waiting and live < job["concurrency"]:
            at = waiting.pop()
            sampling = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=lengths[at],
                stop_token_ids=job["eos_ids"],
                detokenize=False,
                output_kind=delta,
            )
            added[at] = time.perf_counter()
            engine.add_request(str(at), {"prompt_token_ids": prompts[at]}, sampling)
            live += 1
        for out in engine.step():
            at, now_s = int(out.request_id), time.perf_counter()
            new = len(out.outputs[0].token_ids)
            if new and not tokens[at]:
                first[at] = now_s - added[at]
            tokens[at] += new
            if out.finished:
                last[at] = now_s - added[at]
                live -= 1
    seconds = time.perf_counter() - start_s
    return {
        "seconds": seconds,
        "ttft_s": first,
        "total_s": last,
        "tokens": [int(t) for t in tokens],
    }


if __name__ == "__main__":
    serve(open_vllm)
