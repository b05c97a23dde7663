"""`parlay bench engine`, put together: load, measure, print, write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from parlay.engine import bench
from parlay.engine.demo.prompts import TASKS, demo_prompts
from parlay.engine.llm import load_backend
from parlay.engine.weights import default_model_dir, load_checkpoint


def bench_main(quick: bool, json_file: Path | None, console: Console) -> None:
    """Measure, print tables and write the JSON; quick: one prompt a task and fewer tokens."""
    checkpoint = default_model_dir()
    backend, tokenizer = load_backend()
    count, output_tokens, rounds = (1, 48, 1) if quick else (2, 128, 3)
    prompts = [
        (p.task, tokenizer.chat([{"role": "user", "content": p.text}]))
        for task in TASKS
        for p in [p for p in demo_prompts() if p.task == task][:count]
    ]
    contenders = [
        bench.parlay_contender(backend, tokenizer.eos_ids, "none", "none"),
        bench.parlay_contender(backend, tokenizer.eos_ids, "adaptive", "goodput"),
        bench.hf_contender(str(checkpoint), backend.target.dtype),
    ]
    with Progress(console=console) as progress:
        bar = progress.add_task("decoding", total=rounds * len(prompts) * len(contenders))
        tallies = bench.interleave(
            contenders, prompts, output_tokens, rounds, lambda: progress.advance(bar)
        )
    _, weights = load_checkpoint(checkpoint)
    report: dict[str, Any] = {
        "rows": [t.row(c) for t, c in zip(tallies, contenders, strict=True)],
        "floor": bench.floor(sum(w.nbytes for w in weights.values())),
        "verify_width": bench.verify_widths(backend, repeats=10 if quick else 40),
        "output_tokens": output_tokens,
        "prompts": len(prompts),
        "rounds": rounds,
    }
    hf = report["rows"][-1]["tokens_per_s"]
    report["ratio_to_hf"] = {r["mode"]: r["tokens_per_s"] / hf for r in report["rows"][:-1]}
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _print(report, console)


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title="one request at a time")
    for name in ("engine", "mode", "tokens/s", "first token ms", "ms a token after it"):
        table.add_column(name, justify="left" if name in ("engine", "mode") else "right")
    for r in report["rows"]:
        table.add_row(
            r["engine"],
            r["mode"],
            f"{r['tokens_per_s']:.1f}",
            f"{r['ttft_ms']:.0f}",
            f"{r['tpot_ms']:.1f}",
        )
    console.print(table)
    floor, widths = report["floor"], report["verify_width"]
    steps = ", ".join(f"{w} tokens {v['ms']:.1f} ms ({v['ratio']:.2f}x)" for w, v in widths.items())
    console.print(
        f"plain decoding is {report['ratio_to_hf']['none']:.2f}x Hugging Face's generate; reading "
        f"{floor['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{floor['read_bytes_per_s'] / 1e9:.1f} GB/s "
        f"({floor['how']}) takes {floor['step_ms']:.1f} ms, the floor of a step",
        highlight=False,
    )
    console.print(f"a verify pass at batch 1, context {CONTEXT}: {steps}", highlight=False)


CONTEXT = bench.VERIFY_CONTEXT
