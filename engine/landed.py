"""What a pass that was launched gives once it is done."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Landed:
    """Normed states [tokens, hidden], those behind the taps, and logits [places, head rows].

    busy_ms: how long the pass went on after its launch had returned. after: what a graph made
    of the logits besides, `Runner.after` says what.
    """

    hidden: Tensor
    tapped: Tensor
    logits: Tensor
    busy_ms: float
    after: tuple[Tensor, ...] = ()
