"""Stop drafting token by token, by the drafter's own certainty: the plan's stop rule does it.

spec_dec_pp: stop once 1 - prod(p_accept) > threshold, with the drafter's largest probability for
p_accept where nothing better is known; threshold .3, k at most 20. Source: SpecDec++ (Huang et al.
2024), whose trained acceptance head this is without; it also drafts at least 2, a plan's rule does
not. svip: stop once sqrt(.15 H) > threshold, H the entropy of the next token's law; threshold .3, k
at most 40. Source: SVIP (Zhang et al. 2024).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import check_k, rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import BatchView, Plan, Proposer, Reason, StopKind, StopRule

_DRAFT = Proposer.DRAFT_MODEL


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


@dataclass(slots=True, frozen=True)
class SvipSettings:
    """threshold: of the bound on rejection from entropy; k_max, most tokens drafted."""

    threshold: float = 0.3
    k_max: int = 40

    def __post_init__(self) -> None:
        check_k("svip", "k_max", self.k_max, least=1)
        if not self.threshold > 0.0:
            raise ValueError(f"svip: threshold must be above 0, not {self.threshold}")


class Stopper(Stateless):
    """Drafts as deep as it may with the draft model, and leaves the end to a stop rule."""

    def __init__(self, name: str, k_max: int, rule: StopRule) -> None:
        self.name, self.k, self.rule = name, k_max, rule

    def decide(self, view: BatchView) -> Plan:
        """Return the one plan."""
        k = np.full(len(view), self.k)
        plan = rows_plan(view, _DRAFT, k, Reason.HEURISTIC, default=(_DRAFT, self.k))
        return dataclasses.replace(plan, stop_rule=self.rule)


@register("spec_dec_pp", SpecDecPpSettings)
def spec_dec_pp(settings: SpecDecPpSettings, limits: EngineLimits) -> Stopper:
    """Return SpecDec++'s rule."""
    rule = StopRule(StopKind.SURVIVAL, 1.0 - settings.threshold)
    return Stopper("spec_dec_pp", min(settings.k_max, limits.k_max), rule)


@register("svip", SvipSettings)
def svip(settings: SvipSettings, limits: EngineLimits) -> Stopper:
    """Return SVIP's rule."""
    rule = StopRule(StopKind.ENTROPY, settings.threshold)
    return Stopper("svip", min(settings.k_max, limits.k_max), rule)
