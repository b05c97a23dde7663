"""Draft the same for all, verify only what will probably hold: a budget of tokens for the batch.

Source: vLLM's Adaptive Verification and DSpark: B* = argmax over B of (R + sum of the B largest
survivals) / (draft_ms + verify_ms(R + B)), then the B tokens with the largest survival. Survivals
come from confidences one step old, sigma(w_j m + b_j) by place j: one Newton step each 100 steps
from w 0, b 1.5, L2 1e-3, at least 50 observations, slope at least 0, everything verified for the
first 3 fits. The source's m is the margin of the drafter's top two logits; here it is the log-odds
of its largest probability, which for two tokens is the same. Step times are learned (`cost.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import batch_plan, check_k
from parlay.policies.calibration import log_odds
from parlay.policies.cost import StepTime
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import (
    DRAFT_MODEL,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    Proposer,
    Reason,
    StepOutcome,
)

_REFIT_EVERY = 100
_LEAST_SEEN = 50
_WINDOW = 512
_L2 = 1e-3
_START = np.array([0.0, 1.5])
_FULL_FITS = 3
_FORGET_STEPS = 64


@dataclass(slots=True, frozen=True)
class SurvivalBudgetSettings:
    """k: tokens drafted for each request in each step."""

    k: int = 5

    def __post_init__(self) -> None:
        check_k("survival_budget", "k", self.k, least=1)


class MarginFit:
    """Slope and offset f64 [K, 2] of each place's acceptance, from its newest margins."""

    def __init__(self, places: int) -> None:
        self.weights = np.tile(_START, (places, 1))
        self.margin, self.held = np.zeros((2, places, _WINDOW))
        self.seen = np.zeros(places, np.int64)
        self.fits = self.steps = 0

    def chance(self, margin: Array) -> Array:
        """Return P(holds | reached) f64 [rows, K]; where a margin is nan, at the place's mean."""
        filled = np.minimum(self.seen, _WINDOW)
        mean = self.margin.sum(axis=1) / np.maximum(filled, 1)
        m = np.where(np.isnan(margin), mean, margin)
        chance: Array = _sigma(m * self.weights[:, 0] + self.weights[:, 1])
        return chance

    def observe(self, margin: Array, accepted: Array, verified: Array) -> None:
        """Add what one step showed: margins f64 [rows, K]."""
        for place in range(len(self.seen)):
            at = (accepted >= place) & (verified > place) & np.isfinite(margin[:, place])
            for m, held in zip(margin[at, place], accepted[at] > place, strict=True):
                slot = self.seen[place] % _WINDOW
                self.margin[place, slot], self.held[place, slot] = m, held
                self.seen[place] += 1
        self.steps += 1
        if self.steps % _REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        for place in np.flatnonzero(self.seen >= _LEAST_SEEN):
            n = min(int(self.seen[place]), _WINDOW)
            x = np.stack([self.margin[place, :n], np.ones(n)], axis=1)
            p = _sigma(x @ self.weights[place])
            slope = x.T @ (p - self.held[place, :n]) / n + _L2 * self.weights[place]
            curve = (x * (p * (1.0 - p))[:, None]).T @ x / n + _L2 * np.eye(2)
            moved = self.weights[place] - np.linalg.solve(curve, slope)
            self.weights[place] = max(moved[0], 0.0), moved[1]
        self.fits += bool((self.seen >= _LEAST_SEEN).any())

    def state(self) -> dict[str, Array]:
        """Return everything that later estimates depend on."""
        return {
            "weights": self.weights.copy(),
            "margin": self.margin.copy(),
            "held": self.held.copy(),
            "seen": self.seen.copy(),
            "counts": np.array([self.fits, self.steps]),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a checked state."""
        self.weights, self.seen = np.array(state["weights"]), np.array(state["seen"])
        self.margin, self.held = np.array(state["margin"]), np.array(state["held"])
        self.fits, self.steps = (int(v) for v in state["counts"])


@register("survival_budget", SurvivalBudgetSettings)
class SurvivalBudget(Stateless):
    """Keeps each request's newest margins, the fit, and what steps take."""

    name = "survival_budget"

    def __init__(self, settings: SurvivalBudgetSettings, limits: EngineLimits) -> None:
        self.k = max(1, min(settings.k, limits.k_max))
        self.fit, self.step_time = MarginFit(self.k), StepTime()
        self._margin: dict[int, tuple[int, Array]] = {}

    def decide(self, view: BatchView) -> Plan:
        """Return the same k for all, and how many of those tokens to verify."""
        plan = batch_plan(view, Proposer.DRAFT_MODEL, self.k, Reason.BEST_GOODPUT)
        if self.fit.fits < _FULL_FITS or not len(view):
            return plan
        unknown = np.full(self.k, np.nan)
        margin = np.stack([self._margin.get(r, (0, unknown))[1] for r in view.request_id.tolist()])
        survival = np.zeros((len(view), PROPOSERS, self.k), np.float32)
        survival[:, DRAFT_MODEL] = np.cumprod(self.fit.chance(margin), axis=1)
        lines = np.tile(np.array([[1.0], [0.0]], np.float32), (PROPOSERS, 1, self.k))
        lines[DRAFT_MODEL] = self.fit.weights.T
        return dataclasses.replace(
            plan,
            survival=survival,
            calibration=lines if self.k > 1 else lines[:, :, 0],
            budget_tokens=self._budget(view, survival[:, DRAFT_MODEL]),
        )

    def _budget(self, view: BatchView, survival: Array) -> int:
        can = np.where((view.prefill_tokens == 0)[:, None], survival, 0.0)
        gain = np.sort(can[can > 0.0].astype(float))[::-1]
        rows, many = len(view), np.arange(len(gain) + 1)
        a_pass, token_ms, _ = self.step_time.draft_ms()
        draft_ms = self.k * (a_pass + rows * token_ms[DRAFT_MODEL])
        ms = draft_ms + self.step_time.verify_ms(rows + many, float(view.kv_tokens))
        return int(((rows + np.append(0.0, gain.cumsum())) / ms).argmax())

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step, and keep its margins for the next one."""
        self.step_time.observe(outcome, 0.0)
        rows = np.flatnonzero((outcome.proposer == DRAFT_MODEL) & (outcome.drafted_k > 0))
        margin = np.full((len(rows), self.k), np.nan)
        reach = min(self.k, outcome.confidences.shape[1])
        margin[:, :reach] = log_odds(outcome.confidences[rows, :reach])
        self.fit.observe(margin, outcome.accepted[rows], outcome.verified_k[rows])
        for request_id, m in zip(outcome.request_id[rows].tolist(), margin, strict=True):
            self._margin[request_id] = (self.fit.steps, m)
        if self.fit.steps % _FORGET_STEPS == 0:
            old = self.fit.steps - _FORGET_STEPS
            self._margin = {r: kept for r, kept in self._margin.items() if kept[0] > old}

    def state(self) -> dict[str, Array]:
        """Return the fit, step times and the newest margins."""
        parts = {"fit": self.fit.state(), "cost": self.step_time.state()}
        flat = {f"{part}.{key}": value for part, of in parts.items() for key, value in of.items()}
        ids, kept = list(self._margin), list(self._margin.values())
        margins = np.array([m for _, m in kept]).reshape(len(ids), self.k)
        return {
            **flat,
            "request_id": np.array(ids, np.uint64),
            "request_margin": margins,
            "request_step": np.array([at for at, _ in kept], np.int64),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        own = self.state()
        if set(state) != set(own) or np.shape(state["fit.weights"]) != (self.k, 2):
            raise ValueError("survival_budget: the state is of another policy or another k")
        for head, part in (("fit.", self.fit), ("cost.", self.step_time)):
            part.load({k.removeprefix(head): v for k, v in state.items() if k.startswith(head)})
        ids, steps = state["request_id"].tolist(), state["request_step"].tolist()
        kept = zip(steps, np.array(state["request_margin"]), strict=True)
        self._margin = dict(zip(ids, kept, strict=True))


def _sigma(x: Array) -> Array:
    found: Array = 1.0 / (1.0 + np.exp(-np.clip(x, -30.0, 30.0)))
    return found
