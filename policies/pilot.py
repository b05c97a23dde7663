"""The flagship: goodput's estimates and plan, with each request's worth, scarce memory and a guard.

`goodput` makes every token count the same. Here a token counts more where its request is behind its
latency target, less where that has time to spare, and more again where others have kept a request
from drafting for long; a drafted token costs more as the cache fills; and the guard sees to it that
the whole is never slower than not speculating.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.goodput import Goodput, GoodputSettings
from parlay.policies.guard import Guard
from parlay.policies.guard_terms import GuardSettings
from parlay.policies.policy import EngineLimits, Policy, register
from parlay.policies.types import K_LIMIT, Array, BatchView, Plan, StepOutcome

_URGENCY = 2.0
_LEAST_WEIGHT, _MOST_WEIGHT = 0.5, 4.0
_PACE_DECAY = 0.95
"""Weight of the past in a request's time a token: about its last twenty tokens."""
_STARVED_WEIGHT = 8.0
_SCARCE_SHARE = 0.1
"""Of the cache free: below it a drafted token has a price."""
_PROBE_SHARE = 0.004
_VERSION = "pilot/1"
_ALL = slice(None)


@dataclass(slots=True, frozen=True)
class PilotSettings:
    """k_max: most tokens drafted for one request in a step. starved_steps: longest that a request
    which gains by drafting goes without while others draft. guard: whether the gain is watched.
    seed: of the guard's blocks.
    """  # noqa: D205

    k_max: int = 12
    starved_steps: int = 64
    guard: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.k_max <= K_LIMIT:
            raise ValueError(f"pilot: k_max must be between 1 and {K_LIMIT}, not {self.k_max}")
        if self.starved_steps < 1:
            raise ValueError(f"pilot: starved_steps must be 1 or more, not {self.starved_steps}")
        if self.seed < 0:
            raise ValueError(f"pilot: seed must be 0 or more, not {self.seed}")


@register("pilot", PilotSettings)
def pilot(settings: PilotSettings, limits: EngineLimits) -> Policy:
    """Return the flagship, under its guard unless that is off."""
    core = Pilot(settings, limits)
    if not settings.guard:
        return core
    guard = Guard(core, GuardSettings(probe_share=_PROBE_SHARE, seed=settings.seed))
    guard.name = core.name
    return guard


class Pilot:
    """Plans for the most worth a millisecond; deterministic from its history."""

    name = "pilot"

    def __init__(self, settings: PilotSettings, limits: EngineLimits) -> None:
        self.settings = settings
        self.core = Goodput(GoodputSettings(settings.k_max), limits)
        # By request: pace in ms a token (nan: none yet), and steps since it drafted while others
        # did. Sorted by id, so that a step's rows are found at once; the last batch is kept found.
        self._ids = np.zeros(0, np.uint64)
        self._pace_ms, self._waited = np.zeros(0), np.zeros(0, np.int32)
        self._batch: bytes | None = None
        self._at = np.zeros(0, np.intp)

    @property
    def expected_gain(self) -> float:
        """Return the last plan's goodput over that of no speculation, as the estimates have it."""
        return self.core.expected_gain

    def decide(self, view: BatchView) -> Plan:
        """Return the plan for the batch in `view`."""
        self._keep(view.request_id)
        plan = self.core.weighted(view, self._weight(view), self._block_price_ms(view))
        plan.policy_version = _VERSION
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from one finished step."""
        self.core.observe(outcome)
        at, known = self._places(outcome.request_id)
        at, emitted = at[known], outcome.emitted[known].astype(float)
        old, pace = self._pace_ms[at], outcome.step_ms / np.maximum(emitted, 1.0)
        kept = _PACE_DECAY**emitted
        mixed = np.where(np.isnan(old), pace, kept * old + (1.0 - kept) * pace)
        self._pace_ms[at] = np.where(emitted > 0, mixed, old)
        drafted = outcome.drafted_k[known] > 0
        if drafted.any():
            self._waited[at] = np.where(drafted, 0, self._waited[at] + 1)

    def _weight(self, view: BatchView) -> Array:
        """Return f64 [rows]: what a token of each row counts."""
        # Behind its target a request counts as the square of how far, ahead of it likewise less.
        behind = self._pace_ms[self._at] / view.tpot_target_ms
        weight = np.minimum(np.maximum(behind**_URGENCY, _LEAST_WEIGHT), _MOST_WEIGHT)
        weight[~np.isfinite(behind)] = 1.0
        weight[self._waited[self._at] >= self.settings.starved_steps] *= _STARVED_WEIGHT
        return weight

    def _block_price_ms(self, view: BatchView) -> float:
        """Return what a drafted token costs for the cache it takes: a token's worth when full."""
        if not view.total_blocks:
            return 0.0
        free = view.free_blocks / view.total_blocks
        return self.core.token_value_ms * max(1.0 - free / _SCARCE_SHARE, 0.0)

    def _keep(self, request_id: Array) -> None:
        """Forget who has left, and make room for who is new."""
        batch = request_id.tobytes()
        if batch == self._batch:
            return
        ids = np.sort(request_id)
        pace, waited = np.full(len(ids), np.nan), np.zeros(len(ids), np.int32)
        at, known = self._places(ids)
        pace[known], waited[known] = self._pace_ms[at[known]], self._waited[at[known]]
        self._ids, self._pace_ms, self._waited = ids, pace, waited
        self._batch, self._at = batch, np.searchsorted(ids, request_id)

    def _places(self, request_id: Array) -> tuple[Array, Array | slice]:
        """Return where requests stand, and which of them are there (else the place is 0)."""
        if request_id.tobytes() == self._batch:
            return self._at, _ALL
        if not len(self._ids):
            return np.zeros(len(request_id), np.intp), np.zeros(len(request_id), bool)
        at = np.minimum(np.searchsorted(self._ids, request_id), len(self._ids) - 1)
        known = self._ids[at] == request_id
        return np.where(known, at, 0), known

    def state(self) -> dict[str, Array]:
        """Return everything that later decisions depend on."""
        own: dict[str, Array] = {
            "ids": self._ids,
            "pace_ms": self._pace_ms,
            "waited": self._waited,
        }
        core = {f"core.{key}": value for key, value in self.core.state().items()}
        return {**{key: value.copy() for key, value in own.items()}, **core}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        missing = {"ids", "pace_ms", "waited"} - set(state)
        if missing or not len(state["ids"]) == len(state["pace_ms"]) == len(state["waited"]):
            raise ValueError("pilot: the state is incomplete or of another version")
        head = "core."
        self.core.load({k.removeprefix(head): v for k, v in state.items() if k.startswith(head)})
        self._ids = np.array(state["ids"], np.uint64)
        self._pace_ms = np.array(state["pace_ms"], float)
        self._waited = np.array(state["waited"], np.int32)
        self._batch = None

    def delta(self, since: int) -> dict[str, Array]:
        """Return the acceptance counts gathered since `since`."""
        return self.core.delta(since)

    def merge(self, deltas: list[dict[str, Array]]) -> None:
        """Add other replicas' acceptance counts."""
        self.core.merge(deltas)
