"""The stages of `parlay distill medusa`: the target's answers, heads trained on them, figures."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from parlay.engine.distill.llama import target_of
from parlay.engine.distill.medusa_measure import WIDEST, HeadsFigures, heads_by_task
from parlay.engine.distill.medusa_train import new_heads, train_heads
from parlay.engine.distill.pipeline import (
    Settings,
    finish,
    held_out_answers,
    progress_bar,
    require_data,
    self_generated,
)
from parlay.engine.distill.states import state_layers
from parlay.engine.distill.student import HEAD_ROWS, frequent_ids
from parlay.engine.distill.train import Progress
from parlay.engine.draft_format import load_draft
from parlay.engine.medusa_format import OfTarget, load_heads, read_heads_card, save_heads
from parlay.engine.weights import default_model_dir, load_checkpoint


def make_heads(
    settings: Settings, out: Path, console: Console, draft: Path | None = None
) -> dict[str, Any]:
    """Run every stage, write the heads, and return their card.

    draft: a file of `parlay distill draft` that the first head starts from; none: a random start.
    """
    torch.set_num_threads(1)
    folder = settings.model or default_model_dir()
    config, weights = load_checkpoint(folder)
    target = target_of(config, weights, torch.bfloat16)
    source = None if draft is None else load_draft(draft, target.embedding)[1]
    examples = list(self_generated(settings, config, weights, console))
    vocab = frequent_ids((e.ids[e.prompt :] for e in examples), HEAD_ROWS)
    student = new_heads(target, vocab, state_layers(config), settings.seed, source)
    with progress_bar(console, "train", 60 * settings.minutes) as bar:

        def report(state: Progress) -> None:
            bar.reach(state.used_s, f"loss {state.loss:.3f} right {state.agreed:.3f}")

        checkpoint = settings.work / f"medusa-{settings.seed}.pt"
        minutes, seed = settings.minutes, settings.seed
        state = train_heads(student, target, examples, minutes, seed, checkpoint, report)
    card = {
        "target": folder.name,
        "seed": settings.seed,
        "started_from": None if draft is None else draft.name,
        "prompts": [[settings.seed, settings.drawn]],
        "answer_tokens": sum(len(e.ids) - e.prompt for e in examples),
        "trained_tokens": state.tokens,
        "steps": state.steps,
    }
    save = partial(save_heads, out, student.config, student.tensors(), vocab, target.embedding)
    return finish(card, save, partial(measure_heads, settings, out, console), console)


def measure_heads(settings: Settings, path: Path, console: Console) -> dict[str, Any]:
    """Measure heads on held-out prompts; print tables and return their card with the figures.

    path: a file of ours or a public checkpoint's folder.
    """
    require_data()
    torch.set_num_threads(1)
    config, weights = load_checkpoint(settings.model or default_model_dir())
    target = target_of(config, weights, torch.bfloat16)
    heads = load_heads(path, OfTarget(config, target.embedding, target.head))
    card = {} if path.is_dir() else read_heads_card(path)
    texts = held_out_answers(settings, config, weights, card, console)
    with progress_bar(console, "guess at every position", len(texts)) as bar:
        found = heads_by_task(heads, target, texts, bar.add)
    _show(found)
    return {**card, "tasks": {task: dataclasses.asdict(f) for task, f in found.items()}}


def _show(found: dict[str, HeadsFigures]) -> None:
    depth = max((len(f.accepted) for f in found.values()), default=0)
    table = Table("task", *(f"k={k}" for k in range(1, depth + 1)), title="accepted tokens, mean")
    for task, f in found.items():
        table.add_row(task, *(f"{m:.2f}" for m in f.accepted))
    Console().print(table)
    ranks = (f"top-{b}" for b in range(1, WIDEST + 1))
    table = Table("task", "head", *ranks, title="share of right tokens")
    for task, f in found.items():
        for head, row in enumerate(f.top, 1):
            table.add_row(task, str(head), *(f"{share:.3f}" for share in row))
    Console().print(table)
