"""One k for the batch, also 0, learned for each range of batch sizes in bins that double.

Source: Nightjar (Li et al. 2025, 2512.22420): time at a batch size goes in blocks of 2^(j-1) steps,
each cut into bins of the square root of its length. A bin keeps one k: with chance 1 / sqrt(bin),
counted within its block, any at random, else the argmin of 1 / g(k) + 1[k before was 0 and k > 0]
C_switch / k. g: tokens a request gets a millisecond at that batch size, unknown ones first;
C_switch: what beginning to draft again costs (the draft model catches up).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import Pulls, check_seed, state_of
from parlay.policies.baselines.rows import batch_plan, check_k, drafter, slot_of
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import Array, BatchView, Plan, Reason, StepOutcome

_LEAST = 2 ** np.arange(10)
"""Batch sizes 1, 2 to 3, 4 to 7 and so on learn apart."""


@dataclass(slots=True, frozen=True)
class NightjarSettings:
    """proposer; k, the choices, rising; switch_ms, C_switch; seed of the draws."""

    proposer: str = "draft_model"
    k: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    switch_ms: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        drafter("nightjar", self.proposer)
        for k in self.k:
            check_k("nightjar", "k", k)
        if len(self.k) < 2 or list(self.k) != sorted(set(self.k)):
            raise ValueError(f"nightjar: k must be two or more numbers that rise, not {self.k}")
        if not 0.0 <= self.switch_ms < math.inf:
            raise ValueError(f"nightjar: switch_ms must be 0 or more, not {self.switch_ms}")
        check_seed("nightjar", self.seed)


def bins_of(block: int) -> tuple[int, int]:
    """Return how many bins block j = 1, 2, ... has, and how many steps a bin takes."""
    length = 1 << (block - 1)
    steps = math.isqrt(length - 1) + 1
    return -(-length // steps), steps


def cheapest(tokens_per_ms: Array, k: Array, before: int, switch_ms: float) -> int:
    """Return the place of the best k; tokens_per_ms f64 [choices], inf where it is not known."""
    begins = (k > 0) & (before == 0)
    return int((1.0 / tokens_per_ms + begins * switch_ms / np.maximum(k, 1)).argmin())


@register("nightjar", NightjarSettings)
class Nightjar(Stateless):
    """Keeps tokens and ms f64 [slots, choices], and each slot's block, bin, steps left and k."""

    name = "nightjar"

    def __init__(self, settings: NightjarSettings, limits: EngineLimits) -> None:
        self.settings = settings
        self.proposer = drafter("nightjar", settings.proposer)
        self.k = np.minimum(settings.k, limits.k_max)
        self.tokens, self.ms = np.zeros((2, len(_LEAST), len(self.k)))
        self.block = np.ones(len(_LEAST), np.int64)
        self.bin, self.left, self.arm = np.zeros((3, len(_LEAST)), np.int64)
        self.chance = np.ones(len(_LEAST))
        self.draws, self.before = 0, 0
        self.pending = Pulls()

    def decide(self, view: BatchView) -> Plan:
        """Return the k of this batch size's bin, choosing one where a bin begins."""
        slot = slot_of(_LEAST, len(view))
        if len(view):
            if self.left[slot] == 0:
                self._next_bin(slot)
            self.left[slot] -= 1
        arm = int(self.arm[slot])
        self.before = int(self.k[arm])
        self.pending.add(view.step_id, slot * len(self.k) + arm)
        plan = batch_plan(view, self.proposer, self.before, Reason.EXPLORE)
        plan.propensity[:] = self.chance[slot]
        return plan

    def _next_bin(self, slot: int) -> None:
        self.bin[slot] += 1
        if self.bin[slot] > bins_of(int(self.block[slot]))[0]:
            self.block[slot] += 1
            self.bin[slot] = 1
        self.left[slot] = bins_of(int(self.block[slot]))[1]
        explore = 1.0 / math.sqrt(self.bin[slot])
        rng = np.random.default_rng((self.settings.seed, self.draws))
        self.draws += 1
        rate = np.full(len(self.k), np.inf)
        np.divide(self.tokens[slot], self.ms[slot], out=rate, where=self.ms[slot] > 0.0)
        best = cheapest(rate, self.k, self.before, self.settings.switch_ms)
        arm = int(rng.integers(len(self.k))) if rng.random() < explore else best
        self.arm[slot] = arm
        self.chance[slot] = explore / len(self.k) + (1.0 - explore) * (arm == best)

    def observe(self, outcome: StepOutcome) -> None:
        """Add a step's tokens and time to the k it had, at the batch size it was planned for."""
        found = self.pending.reward(outcome)
        if found is not None and 0.0 < outcome.step_ms < np.inf:
            place = divmod(found[0], len(self.k))
            self.tokens[place] += found[2]
            self.ms[place] += outcome.step_ms

    def state(self) -> dict[str, Array]:
        """Return everything that later decisions depend on, but for outcomes still to come."""
        return {
            "tokens": self.tokens.copy(),
            "ms": self.ms.copy(),
            "bins": np.stack([self.block, self.bin, self.left, self.arm]),
            "chance": self.chance.copy(),
            "counts": np.array([self.draws, self.before]),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        state_of("nightjar", len(self.k), dict(state), self.state())
        self.tokens, self.ms = np.array(state["tokens"]), np.array(state["ms"])
        self.block, self.bin, self.left, self.arm = np.array(state["bins"], np.int64)
        self.chance = np.array(state["chance"])
        self.draws, self.before = (int(v) for v in state["counts"])
