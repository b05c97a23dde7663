"""k of each request follows what was accepted: beyond it when all held, else towards it.

Source: GammaTune (Gautam et al. 2025): when all drafts held gamma = accepted + delta, else an
exponential average gamma = eta gamma + (1 - eta) accepted; k = ceil(gamma). delta 2, eta .3, start
3. (Their gamma is the speculation length.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.per_request import PerRequest
from parlay.policies.baselines.rows import check_k, drafter, rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import K_LIMIT, Array, BatchView, Plan, Reason, StepOutcome


@dataclass(slots=True, frozen=True)
class GammaTuneSettings:
    """proposer; k_start; delta, tokens beyond what held; eta, the weight of the past."""

    proposer: str = "draft_model"
    k_start: int = 3
    delta: int = 2
    eta: float = 0.3

    def __post_init__(self) -> None:
        drafter("gamma_tune", self.proposer)
        check_k("gamma_tune", "k_start", self.k_start, least=1)
        check_k("gamma_tune", "delta", self.delta, least=1)
        if not 0.0 <= self.eta < 1.0:
            raise ValueError(f"gamma_tune: eta must be at least 0 and below 1, not {self.eta}")


@register("gamma_tune", GammaTuneSettings)
class GammaTune(Stateless):
    """Keeps one length a request."""

    name = "gamma_tune"

    def __init__(self, settings: GammaTuneSettings, limits: EngineLimits) -> None:
        self.settings = settings
        self.proposer = drafter("gamma_tune", settings.proposer)
        self.k_max = max(1, min(limits.k_max, K_LIMIT))
        self.length = PerRequest()

    def decide(self, view: BatchView) -> Plan:
        """Return each request's own k."""
        length = self.length.of(view, self.settings.k_start)
        k = np.clip(np.ceil(length), 1, self.k_max)
        start = min(self.settings.k_start, self.k_max)
        return rows_plan(view, self.proposer, k, Reason.HEURISTIC, default=(self.proposer, start))

    def observe(self, outcome: StepOutcome) -> None:
        """Move the length of every request that drafted."""
        eta, ids = self.settings.eta, outcome.request_id.tolist()
        for row in np.flatnonzero(outcome.verified_k > 0):
            accepted = float(outcome.accepted[row])
            moved = accepted + self.settings.delta
            if accepted < outcome.verified_k[row]:
                before = self.length.get(ids[row], float(outcome.requested_k[row]))
                moved = eta * before + (1.0 - eta) * accepted
            self.length.put(ids[row], min(moved, float(self.k_max)))
        self.length.saw(outcome)

    def state(self) -> dict[str, Array]:
        """Return the length of every request that has one."""
        return self.length.state()

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        self.length.load(state)
