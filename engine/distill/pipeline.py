"""The stages of distillation, each skipped where its result lies in the work folder."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from parlay.engine.distill.ask import TASK as ASKED_TASK
from parlay.engine.distill.ask import asked
from parlay.engine.distill.examples import Example, read_shards, windowed
from parlay.engine.distill.generate import Decoder, Job, answer
from parlay.engine.distill.held_out import held_out_prompts
from parlay.engine.distill.llama import Target, body_of, target_of
from parlay.engine.distill.measure import DEPTH, Drafter, by_task
from parlay.engine.distill.prompts import Prompt, training_prompts
from parlay.engine.distill.states import state_layers, target_states
from parlay.engine.distill.student import HEAD_ROWS, frequent_ids, new_student
from parlay.engine.distill.talk import talk_prompts
from parlay.engine.distill.train import Progress as Stand
from parlay.engine.distill.train import train
from parlay.engine.draft_format import load_draft, read_card, save_draft
from parlay.engine.model_config import ModelConfig
from parlay.engine.scheduler import DRAFT_WINDOW_TOKENS
from parlay.engine.tokenizer import Tokenizer
from parlay.engine.tokenizer import load as load_tokenizer
from parlay.engine.weights import default_model_dir, load_checkpoint

LONGEST = 640  # tokens of a prompt and its answer
TRAIN_NEW_TOKENS = 200
MEASURE_NEW_TOKENS = 128
GREEDY_SHARE = 0.5
TEMPERATURES = (0.5, 0.7, 0.8, 1.0)
TALK_SHARE = 0.25
ASKED_SHARE = 0.45


@dataclass
class Settings:
    """What to distil; minutes of training; model: a checkpoint's folder, none: the default."""

    work: Path
    seed: int
    prompts: int
    minutes: float
    model: Path | None

    @property
    def talk(self) -> int:
        """Return how many of the prompts are varied talk."""
        return round(self.prompts * TALK_SHARE)

    @property
    def drawn(self) -> int:
        """Return how many of the prompts are drawn from `prompts.py`."""
        return self.prompts - self.talk - self.asked

    @property
    def asked(self) -> int:
        """Return how many of the prompts the target asks itself."""
        return round(self.prompts * ASKED_SHARE)


def make(settings: Settings, out: Path, console: Console) -> dict[str, Any]:
    """Run every stage, write the draft, and return its card."""
    torch.set_num_threads(1)
    folder = settings.model or default_model_dir()
    config, weights = load_checkpoint(folder)
    texts = self_generated(settings, config, weights, console)
    target = target_of(config, weights, torch.bfloat16)
    examples = [windowed(e, DRAFT_WINDOW_TOKENS) for e in texts]
    vocab = frequent_ids((e.ids[e.prompt :] for e in examples), HEAD_ROWS)
    student = new_student(target, vocab)
    with progress_bar(console, "train", 60 * settings.minutes) as bar:

        def report(state: Stand) -> None:
            bar.reach(state.used_s, f"loss {state.loss:.3f} agreed {state.agreed:.3f}")

        checkpoint = settings.work / f"checkpoint-{settings.seed}.pt"
        state = train(
            student, target, examples, settings.minutes, settings.seed, checkpoint, report
        )
    card = {
        "target": folder.name,
        "prompts": [[settings.seed, settings.drawn]],
        "answer_tokens": sum(len(e.hidden) for e in examples),
        "trained_tokens": state.tokens,
        "steps": state.steps,
    }
    save = partial(save_draft, out, student.body.config, student.tensors(), vocab, target.embedding)
    return finish(card, save, partial(measure, settings, out, console), console)


def self_generated(
    settings: Settings, config: ModelConfig, weights: Mapping[str, Tensor], console: Console
) -> Iterator[Example]:
    """Let the target ask and answer what the work folder has not yet; return all its answers."""
    settings.work.mkdir(parents=True, exist_ok=True)
    taught = settings.work / f"answers-{settings.seed}"
    tokenizer = load_tokenizer(settings.model or default_model_dir())
    with progress_bar(console, "ask prompts", settings.asked) as bar:
        path = settings.work / f"asked-{settings.seed}.jsonl"
        decoder = partial(Decoder, config, weights, LONGEST)
        questions = asked(path, decoder, tokenizer, settings.asked, settings.seed, bar.add)
    jobs = _training_jobs(settings, tokenizer, questions)
    with progress_bar(console, "answer prompts", len(jobs)) as bar:
        decoder = partial(Decoder, config, weights, LONGEST, state_layers(config))
        answer(decoder, jobs, TRAIN_NEW_TOKENS, taught, bar.add)
    return read_shards(taught)


def finish(
    card: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
    measured: Callable[[], dict[str, Any]],
    console: Console,
) -> dict[str, Any]:
    """Save what was trained under its card, and again with its figures where there is data for it.

    measured: returns the card of what was saved, with figures. Returns the card saved last.
    """
    save(card)
    if "PARLAY_DATA" not in os.environ:
        console.print("not measured: set PARLAY_DATA to the folder of public data, --measure-only")
        return card
    card = measured()
    save(card)
    return card


def measure(settings: Settings, out: Path, console: Console) -> dict[str, Any]:
    """Measure the draft in a file on held-out prompts; print a table and return its figures."""
    require_data()
    torch.set_num_threads(1)
    folder = settings.model or default_model_dir()
    config, weights = load_checkpoint(folder)
    target = target_of(config, weights, torch.bfloat16)
    drafter = _drafter(out, target.embedding)
    card = read_card(out)
    answers = held_out_answers(settings, config, weights, card, console)
    layers = drafter.body.config.state_layers
    with progress_bar(console, "draft at every position", len(answers)) as bar:
        accepted = by_task(drafter, (_served(e, target, layers) for e in answers), bar.add)
    table = Table("task", *(f"k={k}" for k in range(1, DEPTH + 1)), title="accepted tokens, mean")
    for task, means in accepted.items():
        table.add_row(task, *(f"{m:.2f}" for m in means))
    Console().print(table)
    return {**card, "accepted": accepted}


def require_data() -> None:
    """Raise ValueError where the prompts to measure on are not told of."""
    if "PARLAY_DATA" not in os.environ:
        raise ValueError(
            "measuring needs public prompts: set PARLAY_DATA to a folder with MT-Bench's"
            " prompts/mt_bench_question.jsonl and HumanEval's prompts/HumanEval.jsonl.gz"
        )


def held_out_answers(
    settings: Settings,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    card: Mapping[str, Any],
    console: Console,
) -> list[Example]:
    """Return the target's greedy answers to prompts that what has this card did not learn from."""
    settings.work.mkdir(parents=True, exist_ok=True)
    folder = settings.work / "held-out"
    prompts = held_out_prompts(Path(os.environ["PARLAY_DATA"]), card.get("prompts", []))
    jobs = _jobs(load_tokenizer(settings.model or default_model_dir()), prompts)
    with progress_bar(console, "answer held-out prompts", len(jobs)) as bar:
        decoder = partial(Decoder, config, weights, LONGEST)
        answer(decoder, jobs, MEASURE_NEW_TOKENS, folder, bar.add)
    asked_now = {tuple(job.prompt) for job in jobs}
    return [e for e in read_shards(folder) if tuple(e.ids[: e.prompt]) in asked_now]


def _drafter(path: Path, embedding: torch.Tensor) -> Drafter:
    """Read a draft's file, with or without states to read."""
    sizes, own, ids = load_draft(path, embedding)
    body = body_of(sizes, own, embedding.dtype)
    return Drafter(body, own["lm_head.weight"], ids, embedding, own.get("state_proj.weight"))


def _served(example: Example, target: Target, layers: tuple[int, ...]) -> Example:
    """Return what the engine lets a draft read: a window, and the states of the whole text."""
    states = target_states(target, example.ids[:-1], layers)
    return windowed(replace(example, states=states), DRAFT_WINDOW_TOKENS)


def _training_jobs(
    settings: Settings, tokenizer: Tokenizer, questions: list[list[int]]
) -> list[Job]:
    """Mix prompts of every task, varied talk and questions, the same for the same seed."""
    prompts = [
        *training_prompts(settings.drawn, settings.seed),
        *talk_prompts(settings.talk, settings.seed),
    ]
    jobs = [*_jobs(tokenizer, prompts), *(Job(ASKED_TASK, ids, 0.0, 0) for ids in questions)]
    rng = random.Random(settings.seed)
    rng.shuffle(jobs)
    for number, job in enumerate(jobs):
        job.seed = number
        job.temperature = 0.0 if rng.random() < GREEDY_SHARE else rng.choice(TEMPERATURES)
    return jobs


def _jobs(tokenizer: Tokenizer, prompts: list[Prompt]) -> list[Job]:
    """Make greedy jobs of the prompts that are short enough."""
    texts = [tokenizer.chat([{"role": "user", "content": p.text}]) for p in prompts]
    return [
        Job(prompt.task, ids, 0.0, 0)
        for prompt, ids in zip(prompts, texts, strict=True)
        if len(ids) <= LONGEST - TRAIN_NEW_TOKENS - 1
    ]


class _Bar:
    """One line of progress."""

    def __init__(self, progress: Progress, what: str, total: float) -> None:
        self.progress, self.what = progress, what
        self.task = progress.add_task(what, total=total)

    def add(self, count: int = 1) -> None:
        self.progress.advance(self.task, count)

    def reach(self, value: float, note: str) -> None:
        self.progress.update(self.task, completed=value, description=f"{self.what}: {note}")


@contextmanager
def progress_bar(console: Console, what: str, total: float) -> Iterator[_Bar]:
    """Show one bar while the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, what, total)
