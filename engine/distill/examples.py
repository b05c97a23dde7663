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

    ids: both; prompt: tokens of the prompt; states bf16 [places, layers, width]: the target's (see
    `states.py`) at the places up to the last token but one, at least from the prompt's last on; the
    last layer's stand last.
    """

    task: str
    ids: list[int]
    prompt: int
    states: Tensor

    @property
    def hidden(self) -> Tensor:
        """Return the last hidden state before each token of the answer, [answer, width].

        A state is a whole distribution: the loss multiplies it by the target's own head.
        """
        return self.states[self.prompt - len(self.ids) :, -1]


def windowed(example: Example, prompt_tokens: int) -> Example:
    """Return an example without what stands before the last prompt_tokens of its prompt."""
    drop = max(example.prompt - prompt_tokens, 0)
    return Example(example.task, example.ids[drop:], example.prompt - drop, example.states)


def write_shard(path: Path, examples: list[Example]) -> None:
    """Write examples to a file, whole or not at all."""
    shard = {
        "ids": torch.tensor([t for e in examples for t in e.ids], dtype=torch.int32),
        "prompt": torch.tensor([e.prompt for e in examples], dtype=torch.int32),
        "length": torch.tensor([len(e.ids) for e in examples], dtype=torch.int32),
        "places": torch.tensor([len(e.states) for e in examples], dtype=torch.int32),
        "states": torch.cat([e.states for e in examples]),
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
            ids = shard["ids"].split(lengths)
            states = shard["states"].split(shard["places"].tolist())
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{path} is damaged or older than this parlay ({error}); delete it"
            ) from None
        for task, row, prompt, own in zip(tasks, ids, prompts, states, strict=True):
            yield Example(task, row.tolist(), prompt, own)


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
