"""Prompts that drafts are measured on, none of which they were trained on."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

from parlay.engine.distill.prompts import Prompt, training_prompts

HELD_OUT_SEED = 90_001
HUMAN_EVAL_SAMPLE = 60
OWN_TASKS = ("edit", "text", "data")
OWN_EACH = 30
OWN_DRAWN = 1500


def held_out_prompts(data: Path, trained: Iterable[tuple[int, int]]) -> list[Prompt]:
    """Return chat (MT-Bench's first turns), code (HumanEval, a sample), and our own other tasks.

    data: the folder that PARLAY_DATA names. trained: (seed, count) of the calls of training_prompts
    that a draft was trained on; our own prompts are none of those. Raises ValueError where a public
    set is missing.
    """
    return [*_chat(data), *_code(data), *_own(trained)]


def _chat(data: Path) -> list[Prompt]:
    lines = _existing(data / "prompts" / "mt_bench_question.jsonl").read_text(encoding="utf-8")
    return [Prompt("chat", json.loads(line)["turns"][0]) for line in lines.splitlines()]


def _code(data: Path) -> list[Prompt]:
    packed = _existing(data / "prompts" / "HumanEval.jsonl.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    chosen = random.Random(HELD_OUT_SEED).sample(lines, HUMAN_EVAL_SAMPLE)
    return [
        Prompt("code", f"Complete this Python function:\n\n```python\n{json.loads(c)['prompt']}```")
        for c in chosen
    ]


def _own(trained: Iterable[tuple[int, int]]) -> list[Prompt]:
    seen = {p.text for seed, count in trained for p in training_prompts(count, seed)}
    kept: dict[str, list[Prompt]] = {task: [] for task in OWN_TASKS}
    for prompt in training_prompts(OWN_DRAWN, HELD_OUT_SEED):
        if prompt.task in kept and len(kept[prompt.task]) < OWN_EACH and prompt.text not in seen:
            kept[prompt.task].append(prompt)
    return [prompt for group in kept.values() for prompt in group]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path} is missing: set PARLAY_DATA to the folder of public data")
    return path
