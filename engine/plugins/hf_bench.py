"""`parlay bench hf`: adaptive speculation beside transformers' own schedules, on one draft."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from parlay.engine.bench import Contender, Tally, Timing, interleave
from parlay.engine.demo.prompts import TASKS, demo_prompts
from parlay.engine.plugins.hf_shipped import shipped_draft
from parlay.engine.plugins.huggingface import Speculator, parlay_generate
from parlay.engine.weights import default_model_dir

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_ROUND_KEY = "round_ratios"


def bench_hf(
    rounds: Annotated[int, typer.Option(help="each contender decodes all prompts so often")] = 3,
    prompts: Annotated[int, typer.Option(help="of each of the six tasks, 1 to 4")] = 1,
    tokens: Annotated[int, typer.Option(help="decoded a prompt")] = 96,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    policy: Annotated[str, typer.Option(help="what decides for parlay")] = "goodput",
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
    texts = [(p.task, ids) for p, ids in _prompts(str(folder), prompts)]
    tallies = interleave(contenders, texts, tokens, rounds, lambda: None)
    report = report_of(contenders, tallies, len(texts))
    report["counters"] = speculator.counters.as_dict()
    typer.echo(_table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def hf_contenders(model: Any, draft: Any, speculator: Speculator) -> list[Contender]:
    """Return generate as it comes, its four ways to speculate, and ours (the last)."""

    def assisted(tokens: int, schedule: str, confidence: float) -> Callable[[], dict[str, Any]]:
        def use() -> dict[str, Any]:
            config = draft.generation_config
            config.num_assistant_tokens = tokens
            config.num_assistant_tokens_schedule = schedule
            config.assistant_confidence_threshold = confidence
            return {"assistant_model": draft}

        return use

    ways = {
        ("hf", "none"): dict,
        ("hf_assisted", "constant 3"): assisted(3, "constant", 0.0),
        ("hf_assisted", "constant 5"): assisted(5, "constant", 0.0),
        ("hf_assisted", "heuristic"): assisted(5, "heuristic", 0.0),
        ("hf_assisted", "confidence"): assisted(20, "constant", 0.4),
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


def report_of(contenders: list[Contender], tallies: list[Tally], prompts: int) -> dict[str, Any]:
    """Return tokens a second of each, in all and by round, and ours over the best other way."""
    rows = []
    for contender, tally in zip(contenders, tallies, strict=True):
        parts = [tally.timings[i : i + prompts] for i in range(0, len(tally.timings), prompts)]
        by_round = [sum(t.tokens for t in p) / sum(t.total_s for t in p) for p in parts]
        speed = tally.row(contender)["tokens_per_s"]
        rows.append(
            {
                "engine": contender.engine,
                "mode": contender.mode,
                "tokens_per_s": speed,
                "by_round": by_round,
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


def _prompts(folder: str, count: int) -> list[tuple[Any, list[int]]]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    chosen = [p for task in TASKS for p in [p for p in demo_prompts() if p.task == task][:count]]
    turns = [[{"role": "user", "content": p.text}] for p in chosen]
    encode = tokenizer.apply_chat_template
    return [
        (p, encode(turn, add_generation_prompt=True, return_dict=True)["input_ids"])
        for p, turn in zip(chosen, turns, strict=True)
    ]


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
