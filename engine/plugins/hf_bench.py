"""`parlay bench hf`: adaptive speculation beside transformers' own schedules, on one draft."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console

from parlay.engine.bench import Contender, Timing, interleave, tokens_per_s
from parlay.engine.bench_hf import SCHEDULES, scheduled
from parlay.engine.demo.bar import Bar
from parlay.engine.demo.prompts import chat_prompts
from parlay.engine.plugins.hf_shipped import shipped_draft
from parlay.engine.plugins.huggingface import Speculator, parlay_generate
from parlay.engine.weights import default_model_dir
from parlay.policies import DEFAULT_POLICY
from parlay.policies.files import write_json

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_ROUND_KEY = "round_ratios"


def bench_hf(
    rounds: Annotated[int, typer.Option(help="each contender decodes all prompts so often")] = 1,
    prompts: Annotated[int, typer.Option(help="of each of the six tasks, 1 to 4")] = 4,
    tokens: Annotated[int, typer.Option(help="decoded a prompt")] = 96,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    policy: Annotated[str, typer.Option(help="what decides for parlay")] = DEFAULT_POLICY,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Compare adaptive speculation with transformers' own schedules, greedily, one thread."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {dtype}; use {' or '.join(DTYPES)}")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = default_model_dir()
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    draft = shipped_draft(model)
    speculator = Speculator(model, draft, policy, {})
    contenders = hf_contenders(model, draft, speculator)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    texts = chat_prompts(tokenizer, prompts)
    with Bar(Console(stderr=True), rounds * len(texts) * len(contenders)) as bar:
        timings = interleave(contenders, texts, tokens, rounds, bar)
    report = report_of(contenders, timings, len(texts))
    report["counters"] = speculator.counters.as_dict()
    typer.echo(_table(report))
    if json_file is not None:
        write_json(json_file, report)


def hf_contenders(model: Any, draft: Any, speculator: Speculator) -> list[Contender]:
    """Return generate as it comes, its own ways to speculate, and ours (the last)."""

    def assisted(*schedule: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"assistant_model": scheduled(draft, *schedule)}

    ways = {
        ("hf", "none"): dict,
        ("hf_assisted", "constant 3"): assisted(3, "constant", 0.0),
        ("hf_assisted", "constant 5"): assisted(5, "constant", 0.0),
        ("hf_assisted", "heuristic"): assisted(*SCHEDULES["heuristic"]),
        ("hf_assisted", "confidence"): assisted(*SCHEDULES["confidence"]),
        ("hf_prompt_lookup", "10 tokens"): lambda: {"prompt_lookup_num_tokens": 10},
        ("hf_prompt_lookup", "3 tokens"): lambda: {"prompt_lookup_num_tokens": 3},
        ("hf_parlay", "adaptive"): lambda: {
            "custom_generate": parlay_generate,
            "speculator": speculator,
        },
    }
    return [_contender(model, *name, use) for name, use in ways.items()]


def _contender(model: Any, engine: str, mode: str, use: Callable[[], dict[str, Any]]) -> Contender:
    def decode(ids: list[int], output_tokens: int, task: str) -> Timing:
        prompt, extra = torch.tensor([ids]), use()
        if engine == "hf_parlay":
            extra["hints"] = {"task": task}
        start_s = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=output_tokens,
            do_sample=False,
            **extra,
        )
        return Timing(0.0, time.perf_counter() - start_s, out.shape[1] - len(ids))

    return Contender(engine, mode, decode)


def report_of(
    contenders: list[Contender], timings: list[list[Timing]], prompts: int
) -> dict[str, Any]:
    """Return tokens a second of each, in all and by round, and ours over the best other way."""
    rows: list[dict[str, Any]] = []
    for contender, done in zip(contenders, timings, strict=True):
        parts = [done[i : i + prompts] for i in range(0, len(done), prompts)]
        rows.append(
            {
                "engine": contender.engine,
                "mode": contender.mode,
                "tokens_per_s": tokens_per_s(done),
                "by_round": [tokens_per_s(part) for part in parts],
            }
        )
    best = max(rows[:-1], key=lambda r: float(r["tokens_per_s"]))
    ratios = [a / b for a, b in zip(rows[-1]["by_round"], best["by_round"], strict=True)]
    return {
        "rows": rows,
        "best_other": f"{best['engine']} {best['mode']}",
        "ratio": rows[-1]["tokens_per_s"] / best["tokens_per_s"],
        _ROUND_KEY: ratios,
    }


def _table(report: dict[str, Any]) -> str:
    plain = report["rows"][0]["tokens_per_s"]
    lines = [f"{'engine':18}{'mode':14}{'tokens/s':>10}{'x plain':>9}"]
    for r in report["rows"]:
        speed = r["tokens_per_s"]
        lines.append(f"{r['engine']:18}{r['mode']:14}{speed:10.1f}{speed / plain:9.2f}")
    rounds = ", ".join(f"{r:.2f}" for r in report[_ROUND_KEY])
    lines.append(f"adaptive is {report['ratio']:.2f}x {report['best_other']} (by round: {rounds})")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(bench_hf)
