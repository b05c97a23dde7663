"""No speculation: the denominator of every speed-up, and a true bypass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import BatchView, Plan, Proposer


@dataclass(slots=True, frozen=True)
class NoneSettings:
    """Nothing to set."""


@register("none", NoneSettings)
class NoSpeculation(Stateless):
    """k = 0 for every request."""

    name = "none"

    def __init__(self, settings: NoneSettings, limits: EngineLimits) -> None:
        del settings, limits

    def decide(self, view: BatchView) -> Plan:
        """Return a plan that drafts nothing."""
        return rows_plan(view, Proposer.NONE, np.zeros(len(view), np.int16))
