"""What rank 0 tells the others; each order is followed by the tensors that it names. Free of torch.

Orders go through a pipe: nobody has to be awake at a set time for one, and its end tells at once
that the other side is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.engine.model_config import ModelConfig
from parlay.engine.spans import Spans
from parlay.policies.types import Array

TARGET, DRAFT = 0, 1
"""Roles of models; each has a group of ranks, the first so many."""
OPTIONS = ("tensor_parallel", "draft_tensor_parallel")
"""What a role's degree is called where somebody sets it."""
READY = "ready"


@dataclass(slots=True, frozen=True)
class Join:
    """Meet the others in a process group of `world` ranks, and in one for each role's degree.

    backend: torch.distributed's; store: the file where they find each other; deadline_s: how long
    one may wait for another in a collective; threads: of each rank.
    """

    backend: str
    store: str
    world: int
    degrees: tuple[int, ...]
    deadline_s: float
    threads: int


@dataclass(slots=True, frozen=True)
class Load:
    """Make your part of a model; its tensors, by name, shape and dtype's name, follow one by one.

    config: the part's sizes; head_rows: of every rank together; device: rank 0's, the others' are
    those behind it.
    """

    role: int
    config: ModelConfig
    head_rows: int
    dtype: str
    device: str
    invariant: bool
    tensors: Sequence[tuple[str, tuple[int, ...], str]]


@dataclass(slots=True, frozen=True)
class NewCache:
    """Make an empty cache, the next one of the role's model."""

    role: int
    blocks: int
    block_tokens: int


@dataclass(slots=True, frozen=True)
class Run:
    """Run every layer over `spans` with the role's cache; the input [tokens, hidden] follows."""

    role: int
    cache: int
    spans: Spans


@dataclass(slots=True, frozen=True)
class Logits:
    """Compute your rows of the head for so many states, which follow; they are gathered."""

    role: int
    rows: int


@dataclass(slots=True, frozen=True)
class Move:
    """Copy keys and values from slots i64 [n] to others."""

    role: int
    cache: int
    from_slots: Array
    to_slots: Array


Order = Join | Load | NewCache | Run | Logits | Move
