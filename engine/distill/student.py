"""The draft in training, and the loss that makes it agree with the target."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parlay.engine.distill.llama import Body, Target
from parlay.engine.distill.states import state_layers
from parlay.engine.model_config import ModelConfig

LAYERS = 2  # copied from the target's first: they need far fewer tokens than random ones
HEAD_ROWS = 7168
CHUNK_ROWS = 512
DROPOUT = 0.1  # the same answers are read several times
ARGMAX_SHARE = 0.2  # of each label goes to the target's first choice, which greedy decoding emits


@dataclasses.dataclass
class Student:
    """A draft in training: body, head [rows, hidden], vocab i64 [rows], the target's ids.

    state_proj [hidden, state layers * target's hidden] of the target's states that it reads.
    """

    body: Body
    head: nn.Parameter
    vocab: Tensor
    state_proj: nn.Parameter

    def hidden(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return normed states [rows, length, hidden] of tokens' embeddings and target's states.

        states [rows, length, state layers * target's hidden]: of the place before each token.
        """
        normed: Tensor = self.body(embedded + F.linear(states, self.state_proj))
        return normed

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by the names of the shipped file."""
        own: dict[str, Tensor] = {f"model.{n}": p for n, p in self.body.named_parameters()}
        return {**own, "lm_head.weight": self.head, "state_proj.weight": self.state_proj}


def frequent_ids(texts: Iterable[list[int]], rows: int = HEAD_ROWS) -> Tensor:
    """Return the ids that come most often in texts, ascending, i64 [rows or fewer]."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    return torch.tensor(sorted(t for t, _ in counts.most_common(rows)))


def new_student(target: Target, vocab: Tensor, layers: int = LAYERS) -> Student:
    """Start from the target's first layers, its final norm and head's rows, reading no states."""
    config = student_config(target.body.config, len(vocab), layers)
    body = Body(config, DROPOUT)
    for own, source in zip(body.layers, target.body.layers, strict=False):
        own.load_state_dict(source.state_dict())
    body.norm.load_state_dict(target.body.norm.state_dict())
    head = nn.Parameter(target.head[vocab].bfloat16())
    read = len(config.state_layers) * target.body.config.hidden
    state_proj = nn.Parameter(torch.zeros(config.hidden, read, dtype=torch.bfloat16))
    return Student(body.bfloat16(), head, vocab, state_proj)


def student_config(target: ModelConfig, rows: int, layers: int) -> ModelConfig:
    """Return the draft's sizes: the target's, but for depth, vocabulary and what it reads."""
    return dataclasses.replace(
        target, layers=layers, vocab=rows, tied=False, eos_ids=(), state_layers=state_layers(target)
    )


def favoured(logits: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return a law f32 [n, rows], `share` of it moved to its first choice, and that, i64 [n, 1]."""
    p = F.softmax(logits.float(), -1)
    best = p.argmax(-1, keepdim=True)
    return p.mul_(1 - share).scatter_add_(1, best, torch.full(best.shape, share)), best


class DistilledHead(torch.autograd.Function):
    """The head and its cross-entropy against the teacher's distribution, in chunks of rows.

    Takes hidden [n, hidden], head [rows, hidden], taught [n, target's hidden], the teacher's head
    [rows, target's hidden] and weight [n]; returns f32 [2], summed over n: the loss, and the weight
    of the places where both have the same first choice. Forward makes the gradients too: the
    logits of a whole batch would not fit a CPU's caches.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        """Sum loss and agreement, and keep the gradients."""
        hidden, head, taught, teacher_head, weight = inputs
        sums = torch.zeros(2)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros(head.shape)
        for start in range(0, len(hidden), CHUNK_ROWS):
            at = slice(start, start + CHUNK_ROWS)
            w = weight[at, None]
            log_q = F.log_softmax((hidden[at] @ head.T).float(), -1)
            p, best = favoured(taught[at] @ teacher_head.T, ARGMAX_SHARE)
            sums[0] -= ((p * log_q).sum(-1, keepdim=True) * w).sum()
            sums[1] += ((log_q.argmax(-1, keepdim=True) == best) * w).sum()
            grad = log_q.exp_().sub_(p).mul_(w).to(hidden.dtype)
            hidden_grad[at] = grad @ head
            head_grad += grad.T @ hidden[at]
        ctx.save_for_backward(hidden_grad, head_grad)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what forward kept by the gradient of the loss."""
        hidden_grad, head_grad = ctx.saved_tensors
        scale = grads[0][0]
        dtype = hidden_grad.dtype
        return hidden_grad * scale.to(dtype), (head_grad * scale).to(dtype), None, None, None


def distilled(
    hidden: Tensor, head: Tensor, taught: Tensor, teacher_head: Tensor, weight: Tensor
) -> Tensor:
    """Return summed loss and agreement, f32 [2]; see DistilledHead."""
    apply: Callable[..., Tensor] = DistilledHead.apply
    return apply(hidden, head, taught, teacher_head, weight)
