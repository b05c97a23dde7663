"""`parlay bench engine`, put together: start the peers, choose, measure in rounds, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from parlay.engine import bench
from parlay.engine.bench_lane import CANDIDATES, PARLAY, POLICIES, choose, lane
from parlay.engine.bench_load import Entrant, Load, mixed_loads
from parlay.engine.bench_overhead import overhead_ms
from parlay.engine.bench_peers import check_peers, start_peers, taking_part
from parlay.engine.bench_report import against_best, print_report, ratio_to_hf, rows_of
from parlay.engine.bench_rounds import run_rounds
from parlay.engine.demo.bar import Bar
from parlay.engine.demo.prompts import demo_prompts
from parlay.engine.demo.stats import ADAPTIVE, NONE
from parlay.engine.demo.workload import CONCURRENCIES
from parlay.engine.llm import load_backend
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.weights import default_model_dir, load_checkpoint
from parlay.policies.files import write_json

THREADS = 1
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 4, 4


@dataclass(slots=True, frozen=True)
class Size:
    """How much to run: mean tokens a request, requests by concurrency, rounds, steps, repeats.

    deadline_s: no round but the first begins that might end later than so long after the start.
    """

    output_tokens: int
    requests: dict[int, int]
    rounds: int
    overhead_steps: int
    verify_repeats: int
    deadline_s: float


QUICK = Size(40, {1: 6, 4: 8, 16: 16}, 2, 16, 10, 540.0)
FULL = Size(128, {1: 6, 4: 12, 16: 24}, 4, 48, 40, 3000.0)


def bench_main(
    size: Size, without: Sequence[str], vllm_python: Path, json_file: Path | None, console: Console
) -> None:
    """Measure, print tables and write the JSON. Raises ValueError where a peer is missing."""
    stop_s = time.monotonic() + size.deadline_s
    engines = taking_part(without)
    check_peers(engines, vllm_python)
    checkpoint = default_model_dir()
    prompts = demo_prompts()
    backend, tokenizer = load_backend(threads=THREADS)
    prompt_ids = [tokenizer.chat([{"role": "user", "content": p.text}]) for p in prompts]
    loads = mixed_loads(prompts, prompt_ids, size.output_tokens, size.requests)
    settings = peer_settings(backend, checkpoint)
    with ExitStack() as stack:
        console.print(f"starting peers: {', '.join(engines) or 'none'}", highlight=False)
        peers, about = start_peers(stack, engines, vllm_python, settings, tokenizer.eos_ids)
        report = measure(backend, tokenizer.eos_ids, peers, loads, size, stop_s, console)
    console.print("measuring what a step costs beside the models, and the floor")
    report["overhead_ms"] = overhead_ms(backend, prompt_ids, POLICIES, size.overhead_steps)
    _, weights = load_checkpoint(checkpoint)
    report |= {
        "floor": bench.floor(sum(w.nbytes for w in weights.values())),
        "verify_width": bench.verify_widths(backend, size.verify_repeats),
        "output_tokens": size.output_tokens,
        "prompts": len(prompts),
        "peers": about,
        "dtype": settings["dtype"],
        "threads": THREADS,
    }
    if json_file:
        write_json(json_file, report)
    print_report(report, console)


def peer_settings(backend: TorchBackend, checkpoint: Path) -> dict[str, Any]:
    """Return what makes a peer like us: model, dtype, threads, context, requests, room for KV."""
    model, config = backend.target.config, backend.config
    a_token = 2 * model.layers * model.kv_heads * model.head_dim * backend.target.dtype.itemsize
    return {
        "model": str(checkpoint),
        "dtype": str(backend.target.dtype).removeprefix("torch."),
        "threads": THREADS,
        "context_tokens": config.positions,
        "max_running": max(CONCURRENCIES),
        "kv_bytes": config.target_blocks * config.block_tokens * a_token,
    }


def measure(
    backend: TorchBackend,
    eos_ids: Sequence[int],
    peers: Sequence[Entrant],
    loads: Sequence[Load],
    size: Size,
    stop_s: float,
    console: Console,
) -> dict[str, Any]:
    """Choose our best settings, run the rounds and return the part of the report they make."""
    tried = {
        mode: [(s.name, lane(backend, eos_ids, s.policy, s.settings)) for s in settings]
        for mode, settings in CANDIDATES.items()
    }
    plain, adaptive = (
        Entrant(
            PARLAY,
            mode,
            dict.fromkeys(CONCURRENCIES, POLICIES[mode]),
            lane(backend, eos_ids, POLICIES[mode], {}),
        )
        for mode in (NONE, ADAPTIVE)
    )
    tokens = sum(load.tokens for load in loads)
    choosing = tokens * sum(len(lanes) for lanes in tried.values())
    whole = tokens * (2 + len(tried)) + sum(
        load.tokens for p in peers for load in loads if load.concurrency in p.settings
    )
    with Bar(console, choosing + size.rounds * whole) as bar:

        def done(load: Load) -> None:
            bar.advance(load.tokens)

        bar.start("warming up")
        for entrant in (plain, adaptive, *peers):
            entrant.decode(_warm_up(loads, entrant))
        chosen = []
        for mode, lanes in tried.items():
            bar.start(f"choosing {mode}")
            chosen.append(choose(lanes, mode, loads, done))
        entrants = [plain, *chosen, adaptive, *peers]
        answers = run_rounds(entrants, loads, size.rounds, stop_s, bar.start, done)
        bar.finish()
    rows = rows_of(entrants, answers)
    return {
        "rows": rows,
        "requests": {str(load.concurrency): len(load.prompts) for load in loads},
        "rounds": len(answers[0, loads[0].concurrency]),
        "ratio_to_hf": ratio_to_hf(rows),
        "adaptive_to_best_peer": against_best(rows, peers_only=True),
        "adaptive_to_best": against_best(rows, peers_only=False),
    }


def _warm_up(loads: Sequence[Load], entrant: Entrant) -> Load:
    """Return a few requests of few tokens, as many at once as the entrant takes at most."""
    load = [each for each in loads if each.concurrency in entrant.settings][-1]
    few = min(load.concurrency, _WARM_UP_REQUESTS)
    return Load(few, load.prompts[:few], [_WARM_UP_TOKENS] * few, load.tasks[:few])
