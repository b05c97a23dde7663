"""Prompts and their answers on disk, with what the target thought at every token of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass
class Example:
    """A prompt and its answer.

    ids: both; prompt: tokens of the prompt; hidden bf16 [answer, width]: the target's last hidden
    state before each token of the answer. A state is a whole distribution: the loss multiplies it
    by the target's own head.
    """

    task: str
    ids: list[int]
    prompt: int
    hidden: Tensor


def windowed(example: Example, prompt_tokens: int) -> Example:
    """Return an example without what stands before the last prompt_tokens of its prompt."""
    drop = max(example.prompt - prompt_tokens, 0)
    return Example(example.task, example.ids[drop:], example.prompt - drop, example.hidden)


def write_shard(path: Path, examples: list[Example]) -> None:
    """Write examples to a file, whole or not at all."""
    shard = {
        "ids": torch.tensor([t for e in examples for t in e.ids], dtype=torch.int32),
        "prompt": torch.tensor([e.prompt for e in examples], dtype=torch.int32),
        "length": torch.tensor([len(e.ids) for e in examples], dtype=torch.int32),
        "hidden": torch.cat([e.hidden for e in examples]),
    }
    part = path.with_suffix(".part")
    save_file(shard, part, {"tasks": json.dumps([e.task for e in examples])})
    part.rename(path)


def read_shards(folder: Path) -> Iterator[Example]:
    """Yield the examples of a folder; raises ValueError where a file is damaged."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                tasks = json.loads(opened.metadata()["tasks"])
                shard = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            prompts, lengths = shard["prompt"].tolist(), shard["length"].tolist()
            answers = [n - p for n, p in zip(lengths, prompts, strict=True)]
            ids, hidden = shard["ids"].split(lengths), shard["hidden"].split(answers)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged ({error}); delete it") from None
        for task, row, prompt, states in zip(tasks, ids, prompts, hidden, strict=True):
            yield Example(task, row.tolist(), prompt, states)


def batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Group indices, by falling length, so that no group exceeds batch_tokens with its padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[groups[-1][0]] * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(i)
    return groups


def padded(rows: list[list[int]]) -> Tensor:
    """Return rows as i64 [rows, longest], zeros on the right."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.tensor(row)
    return ids
