"""The demo's own prompts: four for each of six tasks, none of them used to train anything."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

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
