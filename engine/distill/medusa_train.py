"""Distillation of Medusa heads: they learn the frozen target's law of the tokens after the next.

Heads read no text, only states of single positions, so that a batch is any answers end to end. A
head learns where those before it had the text's token among their first choices, for there alone is
it asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parlay.engine.distill.examples import Example
from parlay.engine.distill.llama import Target
from parlay.engine.distill.student import CHUNK_ROWS, favoured
from parlay.engine.distill.train import Optimizer, Progress, forever, restore, spend
from parlay.engine.linear import Linear
from parlay.engine.medusa_heads import HeadsConfig, known_of, make_cells, run_cell

HEADS = 4
BLOCKS = (2, 1)  # the first head, which every draft needs, is the deepest; the others share theirs
LATER_FFN = 8 / 9  # of the target's width; the first head's is the target's own
BATCH_PLACES = 2048
FOLLOWED = 4  # a head learns behind tokens that were among so many first choices of the one before
FOLLOWED_ANYWAY = 0.1  # and at this share of the other places
FIRST_SHARE = 0.5  # of each label goes to the target's first choice
RATE_SHARE = 2 / 3  # of a draft's rate: the first head starts as one
OUT_SCALE = 0.5  # of the target's final norm: heads are less sure than it


@dataclass
class HeadsStudent:
    """Heads in training: weights by the file's names; vocab i64 [rows], the target's ids, and the
    target's rows of them [rows, hidden].
    """  # noqa: D205

    config: HeadsConfig
    weights: dict[str, nn.Parameter]
    vocab: Tensor
    rows: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return dict(self.weights)


def new_heads(
    target: Target,
    vocab: Tensor,
    state_layers: tuple[int, ...],
    seed: int,
    draft: Mapping[str, Tensor] | None = None,
) -> HeadsStudent:
    """Return heads with the target's rows of `vocab`, random but for what they take from a draft.

    draft: the weights of one of `parlay distill draft` for this target, which reads the same
    layers: the first head starts as its layers without their attention.
    """
    c = target.body.config
    ffn = (c.ffn, max(int(c.hidden * LATER_FFN), 1))
    config = HeadsConfig(c.hidden, HEADS, BLOCKS, ffn, state_layers, len(vocab), c.norm_eps)
    rng = torch.Generator().manual_seed(seed)
    start = {} if draft is None else taken_from(draft, target, len(state_layers))
    weights: dict[str, nn.Parameter] = {}
    for name, shape in config.tensor_shapes().items():
        if len(shape) == 1:
            inside = ".layers." in name
            w = torch.ones(shape) if inside else target.body.norm.weight.float() * OUT_SCALE
        elif "down_proj" in name:
            w = torch.zeros(shape)
        else:
            w = torch.randn(shape, generator=rng) * shape[1] ** -0.5
        weights[name] = nn.Parameter(start.get(name, w).bfloat16())
        if weights[name].shape != shape:
            raise ValueError(f"heads cannot start from this draft: {name} would have another shape")
    return HeadsStudent(config, weights, vocab, target.head[vocab].bfloat16().contiguous())


def taken_from(draft: Mapping[str, Tensor], target: Target, layers: int) -> dict[str, Tensor]:
    """Return a draft's weights by the heads' names, inputs scaled for heads' norming them."""
    hidden = target.body.config.hidden
    if "state_proj.weight" not in draft:
        raise ValueError("heads cannot start from this draft: it reads no states of the target")
    scale = torch.ones(layers, 1)
    scale[-1] = target.body.norm.weight.float().square().mean().sqrt()
    states = draft["state_proj.weight"].float() * scale.expand(layers, hidden).flatten()
    token = torch.eye(hidden) * target.embedding.float().square().mean().sqrt()
    found = {
        "heads.0.in_proj.weight": torch.cat((states, token), 1),
        **{f"heads.{cell}.norm.weight": draft["model.norm.weight"] for cell in range(len(BLOCKS))},
    }
    for block in range(BLOCKS[0]):
        at, to = f"model.layers.{block}", f"heads.0.layers.{block}"
        found[f"{to}.norm.weight"] = draft[f"{at}.post_attention_layernorm.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            found[f"{to}.{name}.weight"] = draft[f"{at}.mlp.{name}.weight"]
    return found


@dataclass
class Answers:
    """Some answers end to end: states [n, layers * hidden] from which the target made tokens i64
    [n], and how many tokens of the same answer follow each, i64 [n].
    """  # noqa: D205

    states: Tensor
    tokens: Tensor
    left: Tensor


def answers(examples: list[Example], seed: int) -> Iterator[Answers]:
    """Yield every example once, BATCH_PLACES tokens or a little more at a time, in seed's order."""
    rng = random.Random(seed)
    some: list[Example] = []
    places = 0
    for i in rng.sample(range(len(examples)), len(examples)):
        some.append(examples[i])
        places += len(examples[i].ids) - examples[i].prompt
        if places >= BATCH_PLACES:
            yield end_to_end(some)
            some, places = [], 0
    if some:
        yield end_to_end(some)


def end_to_end(examples: list[Example]) -> Answers:
    """Lay the answers of examples end to end."""
    counts = [len(e.ids) - e.prompt for e in examples]
    return Answers(
        torch.cat([e.states[-n:].flatten(1) for e, n in zip(examples, counts, strict=True)]),
        torch.tensor([t for e in examples for t in e.ids[e.prompt :]]),
        torch.cat([torch.arange(n - 1, -1, -1) for n in counts]),
    )


def learn_heads(
    student: HeadsStudent, target: Target, batch: Answers, rng: torch.Generator
) -> list[tuple[float, float]]:
    """Leave the gradients of one batch; return each head's mean loss and share of right guesses."""
    config, weights = student.config, student.weights

    def linear(*names: str) -> Linear:
        return lambda x: torch.cat([F.linear(x, weights[n]) for n in names], -1)

    cells = make_cells(config, weights, linear)
    row_of = torch.full((len(target.embedding),), -1)
    row_of[student.vocab] = torch.arange(len(student.vocab))
    taught = teacher_law(batch.states[:, -config.hidden :], student.rows)
    at = torch.arange(len(batch.tokens))
    x = known_of(batch.states, config.hidden, config.norm_eps)
    sums, counts = [], []
    for place in range(config.heads):
        keep = (batch.left[at] > place).nonzero()[:, 0]
        at, x = at[keep], x[keep]
        before = target.embedding[batch.tokens[at + place]]
        cell = cells[min(place, len(cells) - 1)]
        x, normed = run_cell(cell, x, before, config.norm_eps, place == 0)
        ahead = at + place + 1
        label = row_of[batch.tokens[ahead]]
        found, hit = imitated(normed, student.rows, taught, ahead, label)
        sums.append(found)
        counts.append(max(int((label >= 0).sum()), 1))
        follow = hit | (torch.rand(len(hit), generator=rng) < FOLLOWED_ANYWAY)
        at, x = at[follow], x[follow]
    torch.stack([s[0] for s in sums]).sum().div(sum(counts)).backward()
    means = [s.detach() / n for s, n in zip(sums, counts, strict=True)]
    return [(float(m[0]), float(m[1])) for m in means]


@torch.no_grad()
def teacher_law(states: Tensor, rows: Tensor) -> Tensor:
    """Return bf16 [n, rows]: the target's law over its rows, some of it moved to the likeliest."""
    law = torch.empty(len(states), len(rows), dtype=torch.bfloat16)
    for start in range(0, len(states), CHUNK_ROWS):
        at = slice(start, start + CHUNK_ROWS)
        law[at], _ = favoured(states[at] @ rows.T, FIRST_SHARE)
    return law


class Imitation(torch.autograd.Function):
    """Fixed output rows and the cross-entropy of their law against the teacher's, in chunks.

    Takes normed states [n, hidden], rows [rows, hidden], taught [places, rows], the place of each
    state and label i64 [n], the row of the text's own token; -1: it has none, and the place counts
    for nothing. Returns f32 [2], summed over n: the loss, and how often the first choice was the
    label; and bool [n]: whether the label was among the first FOLLOWED. Forward makes the
    gradient too: the logits of a whole batch would not fit a CPU's caches.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Sum loss and right guesses, and keep the gradient."""
        normed, rows, taught, places, label = inputs
        sums, hit = torch.zeros(2), torch.zeros(len(normed), dtype=torch.bool)
        grad = torch.empty_like(normed)
        for start in range(0, len(normed), CHUNK_ROWS):
            at = slice(start, start + CHUNK_ROWS)
            z = normed[at] @ rows.T
            mine = z.gather(1, label[at, None].clamp_min(0))
            better, counts = (z > mine).sum(-1), label[at] >= 0
            hit[at] = counts & (better < FOLLOWED)
            z, p = z.float(), taught[places[at]]
            norm = z.logsumexp(-1, keepdim=True)
            loss = norm[:, 0] - torch.linalg.vecdot(z, p.float())
            sums[0] += loss[counts].sum()
            sums[1] += (counts & (better == 0)).sum()
            slope = z.sub_(norm).exp_().sub_(p).mul_(counts[:, None])
            grad[at] = slope.to(normed.dtype) @ rows
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(hit)
        return sums, hit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what forward kept by the gradient of the loss."""
        (grad,) = ctx.saved_tensors
        return grad * grads[0][0].to(grad.dtype), None, None, None, None


def imitated(
    normed: Tensor, rows: Tensor, taught: Tensor, places: Tensor, label: Tensor
) -> tuple[Tensor, Tensor]:
    """Return summed loss and right guesses, f32 [2], and hits bool [n]; see Imitation."""
    apply: Callable[..., tuple[Tensor, Tensor]] = Imitation.apply
    return apply(normed, rows, taught, places, label)


def train_heads(
    student: HeadsStudent,
    target: Target,
    examples: list[Example],
    minutes: float,
    seed: int,
    checkpoint: Path,
    report: Callable[[Progress], None],
) -> Progress:
    """Train new heads for a budget of minutes, or go on from the checkpoint where there is one.

    Loss and agreement reported are the first head's.
    """
    optimizer = Optimizer(student)
    state = restore(checkpoint, optimizer) if checkpoint.exists() else Progress()
    rng = torch.Generator().manual_seed(seed + state.steps)
    batches = forever(lambda s: answers(examples, s), seed + state.steps)

    def learned(batch: Answers) -> tuple[int, float, float]:
        return len(batch.tokens), *learn_heads(student, target, batch, rng)[0]

    return spend(minutes, optimizer, state, batches, learned, checkpoint, report, RATE_SHARE)
