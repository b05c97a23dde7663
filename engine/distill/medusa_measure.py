"""How often Medusa heads are right, at every position of the target's own greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.engine.distill.examples import Example
from parlay.engine.distill.llama import Target
from parlay.engine.distill.states import target_states
from parlay.engine.medusa_heads import Heads, children

WIDEST = 5


@dataclass
class HeadsFigures:
    """Of one task. accepted [heads]: mean accepted tokens at k = 1..heads. top [heads][WIDEST]: how
    often the text's token was among a head's first 1..WIDEST, whatever the heads before it guessed;
    followed [heads][WIDEST]: the same where all of those were right.
    """  # noqa: D205

    accepted: list[float]
    top: list[list[float]]
    followed: list[list[float]]


@torch.inference_mode()
def hits(heads: Heads, target: Target, example: Example) -> Tensor:
    """Return bool [places, heads, WIDEST]: whether a head's guess of that rank is the text's token.

    Heads guess as they are served: each behind the first guesses of those before it. Places with
    fewer than `heads` tokens of the answer behind them are left out.
    """
    n = len(example.ids) - example.prompt - heads.heads
    if n < 1:
        return torch.zeros(0, heads.heads, WIDEST, dtype=torch.bool)
    states = target_states(target, example.ids[:-1], heads.state_layers).flatten(1)
    text = torch.tensor(example.ids)[example.prompt :]
    ids, _ = children(heads, states[example.prompt - 1 :][:n], text[:n], WIDEST)
    return ids == text[1:].unfold(0, heads.heads, 1)[:n, :, None]


def figures_of(found: Tensor) -> HeadsFigures:
    """Return the figures of hits bool [places, heads, WIDEST]."""
    right = found[:, :, 0].long().cumprod(1)
    among = found.long().cumsum(2).float()
    reached = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1).float()
    followed = (among * reached[:, :, None]).sum(0) / reached.sum(0).clamp_min(1.0)[:, None]
    return HeadsFigures(
        _rounded(right.float().mean(0).cumsum(0)),
        [_rounded(row) for row in among.mean(0)],
        [_rounded(row) for row in followed],
    )


def heads_by_task(
    heads: Heads, target: Target, texts: Iterable[Example], done: Callable[[], None]
) -> dict[str, HeadsFigures]:
    """Return the figures of each task; done is called after each text."""
    found: dict[str, list[Tensor]] = {}
    for example in texts:
        found.setdefault(example.task, []).append(hits(heads, target, example))
        done()
    joined = {task: torch.cat(parts) for task, parts in found.items()}
    return {task: figures_of(rows) for task, rows in joined.items() if len(rows)}


def _rounded(values: Tensor) -> list[float]:
    return [round(float(v), 3) for v in values]
