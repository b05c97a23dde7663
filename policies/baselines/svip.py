"""Stop drafting where the next token's law is too spread out.

Source: SVIP (Zhang et al. 2024): stop where sqrt(.15 H) > .3, H the entropy of the drafter's law
for the next token; k at most 40.
"""

from __future__ import annotations

from dataclasses import dataclass

from parlay.policies.baselines.rows import check_k
from parlay.policies.baselines.stopper import Stopper
from parlay.policies.policy import EngineLimits, register
from parlay.policies.types import StopKind, StopRule


@dataclass(slots=True, frozen=True)
class SvipSettings:
    """threshold: of the bound on rejection from entropy; k_max, most tokens drafted."""

    threshold: float = 0.3
    k_max: int = 40

    def __post_init__(self) -> None:
        check_k("svip", "k_max", self.k_max, least=1)
        if not self.threshold > 0.0:
            raise ValueError(f"svip: threshold must be above 0, not {self.threshold}")


@register("svip", SvipSettings)
def svip(settings: SvipSettings, limits: EngineLimits) -> Stopper:
    """Return SVIP's rule."""
    rule = StopRule(StopKind.ENTROPY, settings.threshold)
    return Stopper("svip", min(settings.k_max, limits.k_max), rule)
