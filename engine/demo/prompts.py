"""The demo's own prompts: four for each of six tasks, none of them used to train anything."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

TASKS = ("chat", "code", "edit", "extract", "summarise", "continue")


@dataclass(slots=True, frozen=True)
class DemoPrompt:
    """A task tag, a name for tables, and the user's turn."""

    task: str
    name: str
    text: str


def parse_prompts(source: str) -> tuple[DemoPrompt, ...]:
    """Read prompts that each start with a line `=== task name`; ValueError if malformed."""
    prompts = []
    for part in source.split("\n=== ") if source.startswith("=== ") else ():
        head, _, text = part.removeprefix("=== ").partition("\n")
        task, _, name = head.partition(" ")
        if task not in TASKS or not name or not text.strip():
            raise ValueError(
                f"demo prompt '{head}' needs a known task ({', '.join(TASKS)}), a name and a text"
            )
        prompts.append(DemoPrompt(task, name, text.strip("\n")))
    if not prompts:
        raise ValueError("the demo's prompts must start with a line '=== task name'")
    return tuple(prompts)


def demo_prompts() -> tuple[DemoPrompt, ...]:
    """Return the 24 prompts that ship with parlay."""
    path = resources.files("parlay.engine") / "data" / "demo_prompts.txt"
    return parse_prompts(path.read_text(encoding="utf-8"))


def chat_prompts(tokenizer: Any, of_each: int) -> list[tuple[str, list[int]]]:
    """Return (task, token ids) of the first so many prompts of each task.

    tokenizer: a Hugging Face one; its chat template is applied.
    """
    ours = demo_prompts()
    chosen = [p for task in TASKS for p in [p for p in ours if p.task == task][:of_each]]
    turns = [[{"role": "user", "content": p.text}] for p in chosen]
    encode = tokenizer.apply_chat_template
    ids = [encode(t, add_generation_prompt=True, return_dict=True)["input_ids"] for t in turns]
    return [(p.task, one) for p, one in zip(chosen, ids, strict=True)]
