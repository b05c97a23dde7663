"""Stop drafting once some token has probably been rejected.

Source: SpecDec++ (Huang et al. 2024): stop where 1 - prod(p_accept) > .3, k from 2 to 20. Its
acceptance head is trained; here p_accept is the drafter's largest probability. A plan's rule knows
no least k, so that a draft may end before its second token.
"""

from __future__ import annotations

from dataclasses import dataclass

from parlay.policies.baselines.rows import check_k
from parlay.policies.baselines.stopper import Stopper
from parlay.policies.policy import EngineLimits, register
from parlay.policies.types import StopKind, StopRule


@dataclass(slots=True, frozen=True)
class SpecDecPpSettings:
    """threshold: how likely a rejection may be; k_max, most tokens drafted."""

    threshold: float = 0.3
    k_max: int = 20

    def __post_init__(self) -> None:
        check_k("spec_dec_pp", "k_max", self.k_max, least=1)
        if not 0.0 < self.threshold < 1.0:
            raise ValueError(
                f"spec_dec_pp: threshold must be between 0 and 1, not {self.threshold}"
            )


@register("spec_dec_pp", SpecDecPpSettings)
def spec_dec_pp(settings: SpecDecPpSettings, limits: EngineLimits) -> Stopper:
    """Return SpecDec++'s rule."""
    rule = StopRule(StopKind.SURVIVAL, 1.0 - settings.threshold)
    return Stopper("spec_dec_pp", min(settings.k_max, limits.k_max), rule)
