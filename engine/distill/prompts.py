"""Prompts that the draft model is distilled on: written here or built from the standard library.

None comes from MT-Bench, HumanEval, Spec-Bench or the demo, on which drafts are measured.
"""

from __future__ import annotations

import ast
import functools
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from parlay.engine.distill.words import (
    ASKS,
    CITIES,
    CODE_ASKS,
    CODE_TASKS,
    EDIT_CODE_ASKS,
    EDIT_TEXT_ASKS,
    GOODS,
    NAMES,
    TEXT_ASKS,
    TOPICS,
)


@dataclass(frozen=True)
class Prompt:
    """A task tag and the user's turn."""

    task: str
    text: str


Function = tuple[str, str, str]  # source, signature with docstring, docstring


@functools.cache
def _library() -> tuple[tuple[Function, ...], tuple[str, ...]]:
    """Return functions and paragraphs of prose of the standard library."""
    functions: list[Function] = []
    paragraphs: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        functions += _functions(source.splitlines(), tree)
        paragraphs += _paragraphs(tree)
    return tuple(functions), tuple(paragraphs)


def _functions(lines: list[str], tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        if not 6 <= (node.end_lineno or 0) - node.lineno <= 30 or not 40 <= len(doc) <= 700:
            continue
        body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        if len(body) < 1400:
            yield body, head, doc


def _paragraphs(tree: ast.Module) -> Iterator[str]:
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    for doc in (ast.get_docstring(tree), *map(ast.get_docstring, classes)):
        for paragraph in (doc or "").split("\n\n"):
            if 200 <= len(paragraph) <= 900 and ">>>" not in paragraph:
                yield " ".join(paragraph.split())


def _record(rng: random.Random) -> dict[str, object]:
    return {
        "id": rng.randrange(1000, 9999), "name": rng.choice(NAMES), "city": rng.choice(CITIES),
        "item": rng.choice(GOODS), "quantity": rng.randrange(1, 9),
        "price": round(rng.uniform(3, 200), 2), "paid": rng.random() < 0.5,
    }  # fmt: skip


def _log_lines(rng: random.Random, count: int) -> str:
    host, level = rng.choice(("api-1", "db-2", "worker-7")), ("INFO", "INFO", "WARN", "ERROR")
    what = ("request served", "cache miss", "retrying connection", "job finished", "slow query")
    return "\n".join(
        f"2031-0{rng.randrange(1, 9)}-1{i % 10} 08:{10 + i}:{rng.randrange(10, 59)} "
        f"{rng.choice(level)} {host} {rng.choice(what)} "
        f"id={rng.randrange(100, 999)} ms={rng.randrange(2, 400)}"
        for i in range(count)
    )


def _chat(rng: random.Random) -> str:
    t, u = rng.sample(TOPICS, 2)
    return rng.choice(ASKS).format(t=t, u=u)


def _code(rng: random.Random, functions: list[Function]) -> str:
    body, head, doc = rng.choice(functions)
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(CODE_ASKS).format(c=rng.choice(CODE_TASKS))
    if kind < 0.7:
        return f"Complete this Python function:\n\n```python\n{head}\n```"
    if kind < 0.8:
        return f"{head}\n"
    if kind < 0.9:
        return f"What does this function do?\n\n```python\n{body}\n```"
    return f"Write a Python function with this description:\n{doc}"


def _edit(rng: random.Random, functions: list[Function], paragraphs: list[str]) -> str:
    if rng.random() < 0.6:
        ask = rng.choice(EDIT_CODE_ASKS)
        return f"{ask} Return the whole function.\n\n```python\n{rng.choice(functions)[0]}\n```"
    ask = rng.choice(EDIT_TEXT_ASKS)
    return f"{ask}:\n\n{rng.choice(paragraphs)}"


def _text(rng: random.Random, paragraphs: list[str]) -> str:
    ask = rng.choice(TEXT_ASKS)
    return f"{ask}\n\n{rng.choice(paragraphs)}"


def _data(rng: random.Random) -> str:
    kind = rng.random()
    rows = [_record(rng) for _ in range(rng.randrange(3, 6))]
    if kind < 0.35:
        array = json.dumps(rows, indent=2)[:-2]
        return f"Continue this JSON array with more records:\n\n{array},"
    if kind < 0.65:
        return "Continue this log:\n\n" + _log_lines(rng, rng.randrange(5, 10))
    orders = " ".join(
        f"{r['name']} from {r['city']} ordered {r['quantity']} {r['item']} at {r['price']}."
        for r in rows
    )
    ask = "Extract the orders from this text as JSON with name, city, quantity, item and price"
    return f"{ask}:\n\n{orders}"


SHARES = {"chat": 0.42, "code": 0.34, "edit": 0.1, "text": 0.06, "data": 0.08}


def training_prompts(count: int, seed: int) -> Iterator[Prompt]:
    """Yield `count` prompts, tasks mixed by SHARES, the same for the same seed."""
    rng = random.Random(seed)
    library = _library()
    functions, paragraphs = list(library[0]), list(library[1])
    rng.shuffle(functions)
    rng.shuffle(paragraphs)
    make: dict[str, Callable[[], str]] = {
        "chat": lambda: _chat(rng),
        "code": lambda: _code(rng, functions),
        "edit": lambda: _edit(rng, functions, paragraphs),
        "text": lambda: _text(rng, paragraphs),
        "data": lambda: _data(rng),
    }
    seen: set[str] = set()
    while len(seen) < count:
        task = rng.choices(list(SHARES), list(SHARES.values()))[0]
        text = make[task]()
        if text not in seen:
            seen.add(text)
            yield Prompt(task, text)
