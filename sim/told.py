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
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    StepOutcome,
)
from parlay.sim.backend import SimBackend
from parlay.sim.costs import Work
from parlay.sim.filtering import FilteringOracle, filtering_oracle

_A_REST = 512
"""Tokens that the price of one caught up is taken over."""


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
        self._costs = _Costs(backend) if costs else None
        if self._costs:
            self.core.step_time = cast(StepTime, self._costs)
        if not tries:
            self.core.explorer = Explorer(EngineLimits(proposer_mask=0))

    def decide(self, view: BatchView) -> Plan:
        """Tell what is known of the batch, then let it plan."""
        self._hazards.known = self.filter.expected(view)
        if self._costs:
            self._costs.rows = int(np.count_nonzero(view.prefill_tokens == 0))
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


class _Costs:
    """Stands in for `StepTime`, with the simulator's prices; rows: that decode in the next step."""

    def __init__(self, backend: SimBackend) -> None:
        self.rows, self._price = 1, backend.costs.time
        self._catches_up = backend.catches_up

    def verify_ms(self, tokens: Array, kv_tokens: float) -> Array:
        """Return the time of the target's pass over so many tokens, with overhead."""
        unique, where = np.unique(tokens, return_inverse=True)
        took = [self._price(Work(int(n), self.rows, int(kv_tokens))) for n in unique]
        each = np.array([t.verify_ms + t.overhead_ms for t in took])
        return np.maximum.accumulate(each)[where]

    def draft_ms(self) -> tuple[float, Array, float]:
        """Return the price of a pass of the draft model, of tokens, and of one caught up."""
        one, many = (self._drafts(draft_rows=(n,)) for n in (1, max(self.rows, 2)))
        token_ms = np.zeros(PROPOSERS)
        token_ms[DRAFT_MODEL] = max(many - one, 0.0) / max(self.rows - 1, 1)
        owed = self._drafts(draft_rows=(1,), catch_up_tokens=_A_REST) - one
        return one, token_ms, max(owed, 0.0) / _A_REST if self._catches_up else 0.0

    def heads_ms(self) -> float:
        """Return the price of a pass of Medusa's heads."""
        return float(self._price(Work(0, 0, 0, medusa_rows=self.rows)).draft_ms[MEDUSA])

    def pad_ms(self) -> float:
        """Return nothing: no row is padded to another's length."""
        return 0.0

    def markup(self) -> float:
        """Return 1: nothing surprises who knows the prices."""
        return 1.0

    def observe(self, outcome: StepOutcome, catch_up_tokens: float) -> None:
        """Learn nothing."""

    def _drafts(self, **work: Any) -> float:
        return float(self._price(Work(0, 0, 0, **work)).draft_ms[DRAFT_MODEL])


Make = Callable[[SimBackend, EngineLimits], Policy]


def _told(name: str, costs: bool, tries: bool) -> Make:
    return lambda backend, limits: Told(name, backend, limits, costs=costs, tries=tries)


TOLD: Mapping[str, Make] = {
    "told_hazards": _told("told_hazards", costs=False, tries=True),
    "told_all": _told("told_all", costs=True, tries=True),
    "told_all_no_tries": _told("told_all_no_tries", costs=True, tries=False),
}
