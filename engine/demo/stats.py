"""From timed cells to ratios, paired within a round; chosen on one half, judged on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

NONE = "none"
ADAPTIVE = "adaptive"
HEADROOM_FLOOR = 0.03
"""Less headroom than this over the best static is noise: no share of it is reported."""


class Timed(Protocol):
    """What a mode did in a cell, as far as speed goes."""

    @property
    def seconds(self) -> float:
        """Wall time."""
        ...

    @property
    def tokens(self) -> int:
        """Emitted tokens."""
        ...


Round = Mapping[str, Sequence[Timed]]
"""One complete round: by mode, what it did in each cell."""


def tokens_per_s(runs: Iterable[Timed]) -> float:
    """Return all tokens over all time."""
    runs = list(runs)
    return sum(r.tokens for r in runs) / sum(r.seconds for r in runs)


def speed(rounds: Sequence[Round], mode: str, cells: Sequence[int]) -> float:
    """Return a mode's tokens a second, pooled over rounds and cells."""
    return tokens_per_s(r[mode][c] for r in rounds for c in cells)


def paired_ratios(rounds: Sequence[Round], mode: str, cells: Sequence[int]) -> list[float]:
    """Return, for each round, the mode's speed over no speculation's in the same round."""
    return [speed([r], mode, cells) / speed([r], NONE, cells) for r in rounds]


def median_ratio(rounds: Sequence[Round], mode: str, cells: Sequence[int]) -> float:
    """Return the median over rounds of the paired ratio."""
    return median(paired_ratios(rounds, mode, cells))


def halves(rounds: Sequence[Round]) -> tuple[Sequence[Round], Sequence[Round]]:
    """Return the rounds to choose on and those to measure on; a single round serves as both."""
    return (rounds[::2], rounds[1::2]) if len(rounds) > 1 else (rounds, rounds)


def best_mode(rounds: Sequence[Round], modes: Sequence[str], cells: Sequence[int]) -> str:
    """Return the fastest mode, pooled over rounds and cells."""
    return max(modes, key=lambda m: speed(rounds, m, cells))


@dataclass(slots=True, frozen=True)
class BestStatic:
    """The static that was fastest on the choosing half, and ratios measured on the other."""

    name: str
    ratio_to_none: float
    adaptive_ratio_to_none: float


def best_static(
    rounds: Sequence[Round], statics: Sequence[str], cells: Sequence[int]
) -> BestStatic:
    """Choose among statics (none included) on one half of the rounds, measure on the other."""
    choosing, measuring = halves(rounds)
    name = best_mode(choosing, statics, cells)
    return BestStatic(
        name, median_ratio(measuring, name, cells), median_ratio(measuring, ADAPTIVE, cells)
    )


@dataclass(slots=True, frozen=True)
class Headroom:
    """What choosing a static for each cell would win over one for all, and what was closed.

    picks: mode of each cell, in the order of `cells`. closed: None where there is little to win.
    """

    picks: list[str]
    ratio_to_none: float
    best_static: BestStatic

    @property
    def headroom(self) -> float:
        """Return how much faster the per-cell choice is than the best single static."""
        return self.ratio_to_none / self.best_static.ratio_to_none - 1

    @property
    def closed(self) -> float | None:
        """Return the share of the headroom that adaptive closed; above 1: more than all."""
        if self.headroom <= HEADROOM_FLOOR:
            return None
        best = self.best_static
        return (best.adaptive_ratio_to_none / best.ratio_to_none - 1) / self.headroom


def per_cell_best(
    rounds: Sequence[Round], statics: Sequence[str], cells: Sequence[int]
) -> Headroom:
    """Choose the fastest static of each cell on one half of the rounds, measure on the other."""
    choosing, measuring = halves(rounds)
    picks = [best_mode(choosing, statics, [c]) for c in cells]
    ratios = []
    for r in measuring:
        picked = tokens_per_s(r[m][c] for m, c in zip(picks, cells, strict=True))
        ratios.append(picked / speed([r], NONE, cells))
    return Headroom(picks, median(ratios), best_static(rounds, statics, cells))


def worst_cell(rounds: Sequence[Round], cells: Sequence[int]) -> tuple[int, float]:
    """Return the cell where adaptive does worst against none, and its median ratio there."""
    ratios = {c: median_ratio(rounds, ADAPTIVE, [c]) for c in cells}
    worst = min(ratios, key=lambda c: ratios[c])
    return worst, ratios[worst]
