"""The n-gram alone, as deep as matches of such a length have held before.

Source: SuffixDecoding (Oliaro et al. 2024): k is at most the length of the match, and a token is
drafted while its chance is at least .1. The chance of each place is counted here by match length:
(accepted + 1) / (observed + 2), half forgotten every 1,024 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import check_k, rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import (
    MATCH_EDGES,
    NGRAM,
    Array,
    BatchView,
    Plan,
    Proposer,
    Reason,
    ShadowKind,
    StepOutcome,
    match_bucket,
)

_HALF_LIFE_STEPS = 1024


@dataclass(slots=True, frozen=True)
class SuffixLengthSettings:
    """least_chance: that a token and all before it hold; k_max, most tokens drafted."""

    least_chance: float = 0.1
    k_max: int = 16

    def __post_init__(self) -> None:
        check_k("suffix_length", "k_max", self.k_max, least=1)
        if not 0.0 < self.least_chance < 1.0:
            raise ValueError(
                f"suffix_length: least_chance must be between 0 and 1, not {self.least_chance}"
            )


@register("suffix_length", SuffixLengthSettings)
class SuffixLength(Stateless):
    """Counts accepted and observed tokens f64 [match buckets, K]."""

    name = "suffix_length"

    def __init__(self, settings: SuffixLengthSettings, limits: EngineLimits) -> None:
        self.least, self.k_max = settings.least_chance, max(1, min(settings.k_max, limits.k_max))
        self.counts = np.zeros((2, len(MATCH_EDGES) + 1, self.k_max))

    def decide(self, view: BatchView) -> Plan:
        """Return for each row as many tokens as are likely enough, at most its match's length."""
        accepted, observed = self.counts
        chance = np.cumprod((accepted + 1.0) / (observed + 2.0), axis=1)
        deep = (chance >= self.least).sum(axis=1)[match_bucket(view.match_tokens)]
        k = np.minimum(deep, view.match_tokens)
        return rows_plan(view, Proposer.NGRAM, k, Reason.HEURISTIC)

    def observe(self, outcome: StepOutcome) -> None:
        """Count drafts of the n-gram, and those that were only scored."""
        self.counts *= 0.5 ** (1.0 / _HALF_LIFE_STEPS)
        mine = (outcome.proposer == NGRAM) & (outcome.verified_k > 0)
        self._count(outcome.match_tokens[mine], outcome.accepted[mine], outcome.verified_k[mine])
        shadow = outcome.shadow
        scored = (shadow.proposer == NGRAM) & (shadow.kind == ShadowKind.MATCH)
        self._count(shadow.match_tokens[scored], shadow.matched[scored], shadow.observed[scored])

    def _count(self, match_tokens: Array, accepted: Array, seen: Array) -> None:
        bucket, place = match_bucket(match_tokens), np.arange(self.k_max)
        held = place < accepted[:, None]
        at_risk = place < np.minimum(accepted + 1, seen)[:, None]
        np.add.at(self.counts[0], bucket, held & at_risk)
        np.add.at(self.counts[1], bucket, at_risk)

    def state(self) -> dict[str, Array]:
        """Return the counts."""
        return {"counts": self.counts.copy()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if set(state) != {"counts"} or np.shape(state["counts"]) != self.counts.shape:
            raise ValueError("suffix_length: the state is of another policy or another k_max")
        self.counts = np.array(state["counts"], float)
