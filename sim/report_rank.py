"""Policies in the report's order, and which of them are there to be compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parlay.sim.rows import BEST_GATE, BEST_STATIC, NONE, Row
from parlay.sim.simulate import ORACLES


@dataclass(slots=True, frozen=True)
class Ranked:
    """A policy's ratio_to_none by scenario, nan where unknown, and their geometric mean."""

    policy: str
    mean: float
    ratios: Mapping[str, float]


def rank(rows: Sequence[Row]) -> list[Ranked]:
    """Return every policy once, the best geometric mean first, unknown ones last.

    The mean is unknown where a scenario's ratio is: means over others would not compare.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.policy, {})[row.scenario] = row.ratio_to_none
    scenarios = {row.scenario for row in rows}
    ranked = [
        Ranked(policy, _mean([ratios.get(s, math.nan) for s in scenarios]), ratios)
        for policy, ratios in found.items()
    ]
    return sorted(ranked, key=lambda r: (-r.mean if math.isfinite(r.mean) else 0.0, r.policy))


def _mean(ratios: Sequence[float]) -> float:
    if not all(math.isfinite(r) and r > 0 for r in ratios):
        return math.nan
    return math.exp(math.fsum(math.log(r) for r in ratios) / len(ratios))


def reference(policy: str) -> bool:
    """Return whether a policy is what the asked ones are compared with."""
    return policy in (NONE, BEST_STATIC, BEST_GATE)


def oracle(policy: str) -> bool:
    """Return whether a policy knows what no policy can."""
    return policy in ORACLES


def asked(policy: str) -> bool:
    """Return whether a policy is judged here, neither a reference nor an oracle."""
    return not reference(policy) and not oracle(policy)


def loses(ratio: float) -> bool:
    """Return whether a ratio shows as below 1 with two digits."""
    return math.isfinite(ratio) and round(ratio, 2) < 1
