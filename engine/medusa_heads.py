"""Medusa heads: guesses of the tokens behind the next one, read off the target's hidden state.

Two kinds behind one interface. `RootedHeads` are ours: the first reads the target's states of the
last position and the token that the target made there (Hydra, arXiv 2402.05109, which feeds heads
the tokens before theirs); each later one reads what the one before it made and the token before its
own. Their output rows are the target's own, trimmed. `PlainHeads` are those of Medusa (arXiv
2401.10774): residual blocks on the last state alone, each with an output layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.linear import Linear
from parlay.engine.medusa_linear import quick_linear

NamedLinear = Callable[..., Linear]


class Heads(Protocol):
    """Heads of one target, on its device.

    heads: tokens they can guess in a row; ids i64 [rows]: the target's token of each logit;
    state_layers: the target's layers whose states they read, ascending and ending in the last.
    """

    heads: int
    ids: Tensor
    state_layers: tuple[int, ...]

    def begin(self, states: Tensor) -> Tensor:
        """Return what `step` takes at place 0; states [n, layers * hidden] of the last position."""
        ...

    def step(self, place: int, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `step` takes at the next place, and logits [n, rows] of this place's token.

        x: of the place before; tokens i64 [n]: the one before this place, at place 0 the last one
        that the target made.
        """
        ...


@dataclass(slots=True, frozen=True)
class HeadsConfig:
    """Sizes of rooted heads.

    hidden: the target's; blocks and ffn: residual blocks of each cell, and the width inside them,
    head j being cell j or the last one; vocab: rows of the shared output layer; norm_eps: of every
    norm. Raises ValueError.
    """

    hidden: int
    heads: int
    blocks: tuple[int, ...]
    ffn: tuple[int, ...]
    state_layers: tuple[int, ...]
    vocab: int
    norm_eps: float

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"heads config: {name} must be at least 1")
        if len(self.ffn) != len(self.blocks) or min(self.ffn, default=0) < 1:
            raise ValueError("heads config: ffn needs a width of at least 1 for each of blocks")
        if not self.blocks or min(self.blocks) < 0 or len(self.blocks) > self.heads:
            raise ValueError("heads config: blocks must name 1 to heads cells")
        layers = list(self.state_layers)
        if not layers or layers != sorted({layer for layer in layers if layer > 0}):
            raise ValueError("heads config: state_layers must ascend from 1 or more")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of the heads."""
        shapes: dict[str, tuple[int, ...]] = {}
        for cell, (blocks, ffn) in enumerate(zip(self.blocks, self.ffn, strict=True)):
            at = f"heads.{cell}"
            read = len(self.state_layers) if cell == 0 else 1
            shapes[f"{at}.in_proj.weight"] = (self.hidden, (read + 1) * self.hidden)
            for block in range(blocks):
                b = f"{at}.layers.{block}"
                shapes[f"{b}.norm.weight"] = (self.hidden,)
                shapes[f"{b}.gate_proj.weight"] = (ffn, self.hidden)
                shapes[f"{b}.up_proj.weight"] = (ffn, self.hidden)
                shapes[f"{b}.down_proj.weight"] = (self.hidden, ffn)
            shapes[f"{at}.norm.weight"] = (self.hidden,)
        return shapes


@dataclass(slots=True)
class Block:
    """One residual block: x + down(silu(gate) * up) of the normed x."""

    norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class Cell:
    """One head without its output rows."""

    in_proj: Linear
    blocks: list[Block]
    norm: Tensor


def make_cells(
    config: HeadsConfig, weights: Mapping[str, Tensor], linear: NamedLinear
) -> list[Cell]:
    """Lay out weights of `config.tensor_shapes`; linear(*names) makes one layer of stacked rows."""
    return [
        Cell(
            linear(f"heads.{cell}.in_proj.weight"),
            [
                Block(
                    weights[f"{at}.norm.weight"],
                    linear(f"{at}.gate_proj.weight", f"{at}.up_proj.weight"),
                    linear(f"{at}.down_proj.weight"),
                )
                for at in (f"heads.{cell}.layers.{b}" for b in range(blocks))
            ],
            weights[f"heads.{cell}.norm.weight"],
        )
        for cell, blocks in enumerate(config.blocks)
    ]


def known_of(states: Tensor, hidden: int, eps: float) -> Tensor:
    """Return states [n, layers * hidden] with each layer's normed by itself."""
    return F.rms_norm(states.unflatten(1, (-1, hidden)), (hidden,), eps=eps).flatten(1)


def run_cell(
    cell: Cell, x: Tensor, before: Tensor, eps: float, first: bool
) -> tuple[Tensor, Tensor]:
    """Return a cell's state [n, hidden], and the same normed for the output rows.

    x: known states [n, layers * hidden] where `first`, else the state of the place before; before
    [n, hidden]: the embedding of the token before.
    """
    width = before.shape[-1:]
    token = F.rms_norm(before, width, eps=eps)
    if first:
        x = cell.in_proj(torch.cat((x, token), 1))
    else:
        x = x + cell.in_proj(torch.cat((F.rms_norm(x, width, eps=eps), token), 1))
    for block in cell.blocks:
        gate, up = block.gate_up(F.rms_norm(x, width, block.norm, eps)).chunk(2, -1)
        x = x + block.down(F.silu(gate) * up)
    return x, F.rms_norm(x, width, cell.norm, eps)


class RootedHeads:
    """Our heads, laid out for one target.

    weights: by `HeadsConfig.tensor_shapes`; embedding and head [vocab, hidden]: the target's, of
    whose head the rows ids i64 are kept.
    """

    def __init__(
        self,
        config: HeadsConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        ids: Tensor,
    ) -> None:
        self.config, self.embedding = config, embedding
        self.heads, self.state_layers = config.heads, config.state_layers
        device, dtype = embedding.device, embedding.dtype
        own = {name: w.to(device=device, dtype=dtype) for name, w in weights.items()}

        def linear(*names: str) -> Linear:
            return quick_linear(torch.cat([own[name] for name in names]))

        self.cells = make_cells(config, own, linear)
        self.ids = ids.to(device)
        self.head = quick_linear(head[ids.to(head.device)].to(device=device, dtype=dtype))

    def begin(self, states: Tensor) -> Tensor:
        """Return the states normed; see `Heads.begin`."""
        return known_of(states, self.config.hidden, self.config.norm_eps)

    def step(self, place: int, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run one head; see `Heads.step`."""
        cell = self.cells[min(place, len(self.cells) - 1)]
        before = self.embedding[tokens]
        x, normed = run_cell(cell, x, before, self.config.norm_eps, place == 0)
        return x, self.head(normed)


class PlainHeads:
    """Medusa's own heads: every one reads the last state, none the tokens before its own.

    blocks [heads][blocks] of (weight [hidden, hidden], bias [hidden]); outputs [heads] of [vocab,
    hidden]; layer: the target's last.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[tuple[Tensor, Tensor]]],
        outputs: Sequence[Tensor],
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def linear(weight: Tensor) -> Linear:
            return quick_linear(weight.to(device=device, dtype=dtype))

        self.blocks = [
            [(linear(w), b.to(device=device, dtype=dtype)) for w, b in head] for head in blocks
        ]
        self.outputs = [linear(w) for w in outputs]
        self.heads = len(outputs)
        self.state_layers: tuple[int, ...] = (layer,)
        self.ids = torch.arange(len(outputs[0]), device=device)

    def begin(self, states: Tensor) -> Tensor:
        """Return the states as they are; see `Heads.begin`."""
        return states

    def step(self, place: int, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run one head, which reads no tokens; see `Heads.step`."""
        y = x
        for linear, bias in self.blocks[place]:
            y = y + F.silu(linear(y) + bias)
        return x, self.outputs[place](y)


def children(heads: Heads, states: Tensor, roots: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the b likeliest tokens of every place, ids i64 [n, heads, b], and probabilities f32.

    Likeliest first; each place follows the first choices of those before it. states [n, layers *
    hidden]; roots i64 [n]: the tokens that the target made from them. b must be at most the rows.
    """
    x, token = heads.begin(states), roots
    ids, probs = [], []
    for place in range(heads.heads):
        x, logits = heads.step(place, x, token)
        top = torch.softmax(logits.float(), -1).topk(b, -1)
        ids.append(heads.ids[top.indices])
        probs.append(top.values)
        token = ids[-1][:, 0]
    return torch.stack(ids, 1), torch.stack(probs, 1)
