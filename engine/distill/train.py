"""Distillation: a small Llama learns the target's next-token distribution at its own answers."""

from __future__ import annotations

import math
import pickle
import random
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from parlay.engine.distill.examples import Example, batches, padded
from parlay.engine.distill.llama import Target
from parlay.engine.distill.states import known_places, state_inputs
from parlay.engine.distill.student import Student, distilled

BATCH_TOKENS = 2048  # small: at this scale more steps beat larger batches
BUCKET_SEQUENCES = 1024
PEAK_RATE = 3e-3
HEAD_SHARE = 0.15  # of the rate, for the weights that AdamW trains
STATE_SHARE = 0.3  # of the rate, for what reads states, which are far larger than embeddings
WARM_UP = 0.03
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
NORM_SCALES = (1.0, 0.5, 0.35, 0.25, 0.15, 0.1)
CHECKPOINT_EVERY_S = 120.0
_UNREADABLE = (EOFError, OSError, struct.error, pickle.UnpicklingError)
AnyBatch = TypeVar("AnyBatch")


@dataclass
class Progress:
    """Where a run stands.

    used_s: seconds of its budget; loss and agreed: the last batch's, agreed being the share of
    places where student and target have the same first choice.
    """

    used_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    loss: float = math.nan
    agreed: float = math.nan


@dataclass
class Batch:
    """Some examples, padded.

    ids i64 [rows, longest]; states [rows, longest, layers * hidden]: the target's that are read
    beside them; at i64 [n]: flat places that predict an output; taught [n, hidden]; weight f32 [n]:
    0 where the output is not in the student's vocabulary.
    """

    ids: Tensor
    states: Tensor
    at: Tensor
    taught: Tensor
    weight: Tensor


def epoch(examples: list[Example], known: Tensor, seed: int) -> Iterator[Batch]:
    """Yield every example once, batched by similar length, in an order that the seed fixes.

    known: bool [target's vocabulary].
    """
    rng = random.Random(seed)
    order = rng.sample(range(len(examples)), len(examples))
    groups: list[list[int]] = []
    for first in range(0, len(order), BUCKET_SEQUENCES):
        bucket = order[first : first + BUCKET_SEQUENCES]
        lengths = [len(examples[i].ids) - 1 for i in bucket]
        groups += [[bucket[i] for i in group] for group in batches(lengths, BATCH_TOKENS)]
    rng.shuffle(groups)
    for group in groups:
        yield _batch([examples[i] for i in group], known, rng)


def _batch(rows: list[Example], known: Tensor, rng: random.Random) -> Batch:
    ids = padded([e.ids[:-1] for e in rows])
    width = ids.shape[1]
    places = [torch.arange(e.prompt - 1, len(e.ids) - 1) + r * width for r, e in enumerate(rows)]
    wanted = torch.tensor([t for e in rows for t in e.ids[e.prompt :]])
    taught = torch.cat([e.hidden for e in rows])
    states = _read_states(rows, width, rng)
    return Batch(ids, states, torch.cat(places), taught, known[wanted].float())


def _read_states(rows: list[Example], width: int, rng: random.Random) -> Tensor:
    """Return [rows, width, layers * hidden], without those of random places of the answers."""
    read = rows[0].states.new_zeros(len(rows), width, rows[0].states[0].numel())
    for own, example in zip(read, rows, strict=True):
        tokens = len(example.ids) - 1
        own[:tokens] = state_inputs(example.states[:-1], tokens)
        own[example.prompt : tokens] *= known_places(tokens - example.prompt, rng)[:, None]
    return read


class Trainee(Protocol):
    """What an optimizer trains."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        ...


class Optimizer:
    """Float32 masters of a student's weights: Muon for all matrices but the head's, else AdamW.

    At equal time Muon was far ahead of AdamW alone.
    """

    def __init__(self, student: Trainee) -> None:
        named = student.tensors()
        self.live = list(named.values())
        self.master = [p.detach().float().clone() for p in self.live]
        groups: dict[float, list[Tensor]] = {HEAD_SHARE: [], 1.0: [], STATE_SHARE: []}
        for name, master in zip(named, self.master, strict=True):
            groups[_share(name, master)].append(master)
        adam = torch.optim.AdamW(groups[HEAD_SHARE], betas=(0.9, 0.98), weight_decay=0.0)
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [(adam, HEAD_SHARE)]
        for share in (1.0, STATE_SHARE):
            if groups[share]:
                self.parts.append((_muon(groups[share]), share))

    def step(self, rate: float) -> None:
        """Apply the gradients of the live weights and clear them."""
        for live, master in zip(self.live, self.master, strict=True):
            assert live.grad is not None
            master.grad, live.grad = live.grad.float(), None
        nn.utils.clip_grad_norm_(self.master, CLIP_NORM)
        for part, share in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * share
            part.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the live weights."""
        for live, master in zip(self.live, self.master, strict=True):
            live.copy_(master)


def _share(name: str, weight: Tensor) -> float:
    """Return a weight's share of the rate, which tells its optimizer too."""
    if name == "state_proj.weight":
        return STATE_SHARE
    return 1.0 if weight.dim() == 2 and name != "lm_head.weight" else HEAD_SHARE


def _muon(matrices: list[Tensor]) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ValueError("training a draft needs torch 2.9 or later (torch.optim.Muon)")
    muon: torch.optim.Optimizer = torch.optim.Muon(
        matrices, adjust_lr_fn="match_rms_adamw", weight_decay=WEIGHT_DECAY
    )
    return muon


def rate_at(progress: float) -> float:
    """Return the learning rate at a share of the time budget: warm-up, then a cosine to nothing."""
    if progress < WARM_UP:
        return PEAK_RATE * progress / WARM_UP
    left = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * left))


def train(
    student: Student,
    target: Target,
    examples: list[Example],
    minutes: float,
    seed: int,
    checkpoint: Path,
    report: Callable[[Progress], None],
) -> Progress:
    """Train a new student for a budget of minutes, or go on from the checkpoint where there is one.

    The schedule follows the time used, so a run that was killed resumes at its rate; it does not
    replay the batches it had seen.
    """
    known = torch.zeros(len(target.embedding), dtype=torch.bool)
    known[student.vocab] = True
    teacher_head = target.head[student.vocab].contiguous()
    resumed = checkpoint.exists()
    if not resumed:
        _calibrate(student, target, next(epoch(examples, known, seed)), teacher_head)
    optimizer = Optimizer(student)
    state = restore(checkpoint, optimizer) if resumed else Progress()
    batches = forever(lambda s: epoch(examples, known, s), seed + state.steps)

    def learned(batch: Batch) -> tuple[int, float, float]:
        return len(batch.at), *learn(student, target, batch, teacher_head)

    return spend(minutes, optimizer, state, batches, learned, checkpoint, report)


def spend(
    minutes: float,
    optimizer: Optimizer,
    state: Progress,
    batches: Iterator[AnyBatch],
    learn_from: Callable[[AnyBatch], tuple[int, float, float]],
    checkpoint: Path,
    report: Callable[[Progress], None],
    rate_share: float = 1.0,
) -> Progress:
    """Spend what is left of a budget of minutes on batches; return where the run stands then.

    learn_from: leaves a batch's gradients and returns its tokens, loss and agreement.
    """
    before, start, saved = state.used_s, time.monotonic(), time.monotonic()
    for batch in batches:
        if state.used_s >= 60 * minutes:
            break
        tokens, loss, agreed = learn_from(batch)
        optimizer.step(rate_share * rate_at(state.used_s / (60 * minutes)))
        now = time.monotonic()
        tokens += state.tokens
        state = Progress(before + now - start, tokens, state.steps + 1, loss, agreed)
        report(state)
        if now - saved > CHECKPOINT_EVERY_S:
            save(checkpoint, optimizer, state)
            saved = now
    save(checkpoint, optimizer, state)
    return state


def forever(epoch: Callable[[int], Iterator[AnyBatch]], seed: int) -> Iterator[AnyBatch]:
    """Yield the batches of epoch(seed), epoch(seed + 1) and so on."""
    while True:
        yield from epoch(seed)
        seed += 1


def learn(
    student: Student, target: Target, batch: Batch, teacher_head: Tensor
) -> tuple[float, float]:
    """Leave the gradients of one batch; return its mean loss and agreement."""
    hidden = student.hidden(target.embedding[batch.ids], batch.states).flatten(0, 1)[batch.at]
    total = batch.weight.sum().clamp_min(1.0)
    sums = distilled(hidden, student.head, batch.taught, teacher_head, batch.weight)
    means = sums / total
    means[0].backward()
    loss, agreed = means.detach().tolist()
    return loss, agreed


def _calibrate(student: Student, target: Target, batch: Batch, teacher_head: Tensor) -> None:
    """Scale the final norm: early layers under the last head are far too sure of themselves."""
    norm = student.body.norm.weight
    full, losses = norm.detach().clone(), {}
    for scale in NORM_SCALES:
        norm.data = full * scale
        losses[scale] = learn(student, target, batch, teacher_head)[0]
    norm.data = full * min(losses, key=losses.__getitem__)
    for p in student.tensors().values():
        p.grad = None


def save(path: Path, optimizer: Optimizer, state: Progress) -> None:
    """Write a checkpoint, whole or not at all."""
    part = path.with_name(path.name + ".part")
    parts = [p.state_dict() for p, _ in optimizer.parts]
    torch.save({"master": optimizer.master, "parts": parts, "state": vars(state)}, part)
    part.rename(path)


def restore(path: Path, optimizer: Optimizer) -> Progress:
    """Read a checkpoint into an optimizer and the student it trains.

    Raises ValueError where it is damaged or belongs to a student of other sizes.
    """
    try:
        kept = torch.load(path, weights_only=True)
        for master, old in zip(optimizer.master, kept["master"], strict=True):
            master.copy_(old)
        for (part, _), old in zip(optimizer.parts, kept["parts"], strict=True):
            part.load_state_dict(old)
        state = Progress(**kept["state"])
    except (*_UNREADABLE, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"checkpoint {path} cannot be used ({error}); delete it") from None
    optimizer.publish()
    return state
