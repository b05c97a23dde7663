"""One k for the batch: the one whose step should emit most tokens a millisecond.

Source: SmartSpec (Liu et al. 2024) and SGLang's throughput-aware steps: argmax over k of
(1 + sum of survivals up to k) / step_ms(batch, k), survivals from the last 20 batches of each
place, scored anew every 10 batches. Step times are learned as the steps run (`cost.py`), where the
sources measure them beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import batch_plan, check_k, drafter
from parlay.policies.cost import StepTime
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import DRAFT_MODEL, Array, BatchView, Plan, Reason, StepOutcome

_WINDOW = 20
_EVERY = 10
_START_SURVIVAL = 0.7


@dataclass(slots=True, frozen=True)
class GoodputBatchSettings:
    """proposer; k_max, most tokens drafted."""

    proposer: str = "draft_model"
    k_max: int = 8

    def __post_init__(self) -> None:
        drafter("goodput_batch", self.proposer)
        check_k("goodput_batch", "k_max", self.k_max, least=1)


@register("goodput_batch", GoodputBatchSettings)
class GoodputBatch(Stateless):
    """Keeps, for each place, which share of the last batches' drafts held up to it."""

    name = "goodput_batch"

    def __init__(self, settings: GoodputBatchSettings, limits: EngineLimits) -> None:
        self.proposer = drafter("goodput_batch", settings.proposer)
        self.k_max = max(1, min(settings.k_max, limits.k_max))
        self.held = np.full((self.k_max, _WINDOW), np.nan)
        self.seen = np.zeros(self.k_max, np.int64)
        self.step_time = StepTime()
        self.batches, self.k = 0, self.k_max

    def decide(self, view: BatchView) -> Plan:
        """Return the batch's k, scored anew now and then."""
        if self.batches % _EVERY == 0 and len(view):
            self.k = self._best(view)
        self.batches += len(view) > 0
        return batch_plan(view, self.proposer, self.k, Reason.BEST_GOODPUT)

    def _best(self, view: BatchView) -> int:
        k = np.arange(self.k_max + 1)
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(self.survival())])
        rows = len(view)
        ms = self.step_time.verify_ms(rows * (1.0 + k), float(view.kv_tokens))
        a_pass, token_ms, _ = self.step_time.draft_ms()
        passes = k * a_pass if self.proposer == DRAFT_MODEL else 0.0
        return int((tokens / (ms + passes + k * rows * token_ms[self.proposer])).argmax())

    def survival(self) -> Array:
        """Return f64 [K]; a place that was never seen goes on as the first one does."""
        survival, reached = np.empty(self.k_max), 1.0
        first = float(np.nanmean(self.held[0])) if self.seen[0] else _START_SURVIVAL
        for place in range(self.k_max):
            known = self.seen[place] > 0
            reached = float(np.nanmean(self.held[place])) if known else reached * first
            survival[place] = reached
        return survival

    def observe(self, outcome: StepOutcome) -> None:
        """Note which places held, and how long the step took."""
        self.step_time.observe(outcome, 0.0)
        drafted = (outcome.proposer == self.proposer) & (outcome.verified_k > 0)
        for place in range(int(outcome.verified_k[drafted].max(initial=0))):
            if place < self.k_max:
                reached = drafted & (outcome.verified_k > place)
                share = float((outcome.accepted[reached] > place).mean())
                self.held[place, self.seen[place] % _WINDOW] = share
                self.seen[place] += 1

    def state(self) -> dict[str, Array]:
        """Return everything that later decisions depend on."""
        cost = {f"cost.{key}": value for key, value in self.step_time.state().items()}
        counts = np.array([self.batches, self.k])
        return {"held": self.held.copy(), "seen": self.seen.copy(), "counts": counts, **cost}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if set(state) != set(self.state()) or np.shape(state["held"]) != self.held.shape:
            raise ValueError("goodput_batch: the state is of another policy or another k_max")
        cost = {k.removeprefix("cost."): v for k, v in state.items() if k.startswith("cost.")}
        self.step_time.load(cost)
        self.held, self.seen = np.array(state["held"], float), np.array(state["seen"], np.int64)
        self.batches, self.k = (int(v) for v in state["counts"])
