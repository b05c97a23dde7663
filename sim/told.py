"""Goodput that is told what it would have to learn, to see what not knowing costs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from parlay.policies.acceptance import Acceptance
from parlay.policies.cost import StepTime
from parlay.policies.explore import Explorer
from parlay.policies.goodput import Goodput, GoodputSettings
from parlay.policies.policy import EngineLimits, Policy, Stateless
from parlay.policies.types import PROPOSERS, Array, BatchView, Plan, StepOutcome
from parlay.sim.backend import SimBackend
from parlay.sim.filtering import FilteringOracle, filtering_oracle
from parlay.sim.true_prices import TruePrices


class Told(Stateless):
    """`goodput` with the filtering oracle's hazards, and where told so the simulator's own costs
    and no tries.
    """  # noqa: D205

    def __init__(
        self, name: str, backend: SimBackend, limits: EngineLimits, *, costs: bool, tries: bool
    ) -> None:
        self.name = name
        self.filter: FilteringOracle = filtering_oracle(backend, limits)
        self.core = Goodput(GoodputSettings(limits.k_max), limits)
        self._hazards = _Hazards(self.core.acceptance)
        self.core.acceptance = cast(Acceptance, self._hazards)
        self.prices = TruePrices(backend)
        if costs:
            self.core.step_time = cast(StepTime, self.prices)
        if not tries:
            self.core.explorer = Explorer(EngineLimits(proposer_mask=0))

    def decide(self, view: BatchView) -> Plan:
        """Tell what is known of the batch, then let it plan."""
        self._hazards.known = self.filter.expected(view)
        self.prices.look(view)
        return self.core.decide(view)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn what is left to learn."""
        self.filter.observe(outcome)
        self.core.observe(outcome)


class _Hazards:
    """Stands in for `Acceptance`, with hazards that are known."""

    def __init__(self, inner: Acceptance) -> None:
        self._inner = inner
        self.known: Array = np.zeros((0, PROPOSERS, inner.k_max))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def survival(self, frailty: Array, match_tokens: Array, only: int | None = None) -> Array:
        """Return what is known, of all proposers or of one."""
        return self.known if only is None else self.known[:, only : only + 1]


Make = Callable[[SimBackend, EngineLimits], Policy]


def _told(name: str, costs: bool, tries: bool) -> Make:
    return lambda backend, limits: Told(name, backend, limits, costs=costs, tries=tries)


TOLD: Mapping[str, Make] = {
    "told_hazards": _told("told_hazards", costs=False, tries=True),
    "told_all": _told("told_all", costs=True, tries=True),
    "told_all_no_tries": _told("told_all_no_tries", costs=True, tries=False),
}
