"""One proposer with one k for every request: what `num_speculative_tokens` sets in other engines.

Tuned per scenario, the best of these is called best static.
"""

from __future__ import annotations

from dataclasses import dataclass

from parlay.policies.baselines.rows import batch_plan, check_k, drafter
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import BatchView, Plan


@dataclass(slots=True, frozen=True)
class FixedSettings:
    """proposer: ngram, draft_model or medusa; k: tokens drafted a step."""

    proposer: str = "ngram"
    k: int = 3

    def __post_init__(self) -> None:
        drafter("fixed", self.proposer)
        check_k("fixed", "k", self.k)


@register("fixed", FixedSettings)
class Fixed(Stateless):
    """The same proposer and k for every request in every step."""

    name = "fixed"

    def __init__(self, settings: FixedSettings, limits: EngineLimits) -> None:
        del limits
        self.proposer = drafter("fixed", settings.proposer)
        self.k = settings.k

    def decide(self, view: BatchView) -> Plan:
        """Return the one plan."""
        return batch_plan(view, self.proposer, self.k)
