"""Stop drafting where entropy promises the next token too little acceptance.

Source: AdaEDL (Agrawal et al. 2024, 2410.18351): with H the entropy of the drafter's law for the
next token, 1 - sqrt(.2 H) is a lower bound on the chance that the token is accepted; drafting stops
where it is below lambda. The source also moves lambda while it runs; here it stands, as its plain
rule has it. A plan's entropy rule looks at sqrt(.15 H), and 1 - sqrt(.2 H) < lambda exactly where
sqrt(.15 H) > (1 - lambda) sqrt(.15 / .2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parlay.policies.baselines.rows import check_k
from parlay.policies.baselines.stopper import Stopper
from parlay.policies.policy import EngineLimits, register
from parlay.policies.types import ENTROPY_SCALE, StopKind, StopRule

_GAMMA = 0.2


@dataclass(slots=True, frozen=True)
class AdaEdlSettings:
    """least_chance: lambda, the lowest bound on acceptance to go on at; k_max, most drafted."""

    least_chance: float = 0.4
    k_max: int = 40

    def __post_init__(self) -> None:
        check_k("ada_edl", "k_max", self.k_max, least=1)
        if not 0.0 < self.least_chance < 1.0:
            raise ValueError(
                f"ada_edl: least_chance must be between 0 and 1, not {self.least_chance}"
            )


@register("ada_edl", AdaEdlSettings)
def ada_edl(settings: AdaEdlSettings, limits: EngineLimits) -> Stopper:
    """Return AdaEDL's rule."""
    threshold = (1.0 - settings.least_chance) * math.sqrt(ENTROPY_SCALE / _GAMMA)
    rule = StopRule(StopKind.ENTROPY, threshold)
    return Stopper("ada_edl", min(settings.k_max, limits.k_max), rule)
