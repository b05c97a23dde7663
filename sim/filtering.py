"""The filtering oracle: knows how requests come about and what steps cost, but no request's luck.

A Bayesian filter over each request's shift (a grid) and phase (two states), fed by what any policy
sees: accepted and rejected drafts, the n-gram's shadow, confidences and match lengths. Two things
are left out: that coins of several proposers at one position agree more than chance, and a change
of phase within one draft.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit, logit
from scipy.stats import norm

from parlay.policies.policy import EngineLimits
from parlay.policies.types import NGRAM, PROPOSERS, Array, BatchView, StepOutcome
from parlay.sim.backend import SimBackend
from parlay.sim.latent import (
    COLD_TOKENS,
    CONFIDENCE_NOISE,
    PHASE_TOKENS,
    Latents,
    match_log_odds,
)
from parlay.sim.oracle import Oracle, latents_of

GRID = 15
_FLOOR = 1e-30


class Filter:
    """Beliefs about requests, a row each, over GRID shifts times two phases."""

    def __init__(self, latents: Latents) -> None:
        self.latents = latents
        nodes = norm.ppf((np.arange(GRID) + 0.5) / GRID)
        nodes /= nodes.std()
        tasks = len(latents.laws)
        self.shift = np.zeros((tasks, 2 * GRID))
        for i, law in enumerate(latents.laws):
            own = law.shift_sd * nodes
            self.shift[i] = np.concatenate([own - law.phase_shift, own + law.phase_shift])
        places = np.arange(latents.depth)
        # chance [cold, task, state, proposer, place]: by how many outputs there were at the start.
        odds = latents.log_odds[:, None] + self.shift[:, :, None, None]
        warm = expit(odds)
        cold = np.array([law.cold_factor for law in latents.laws])[:, None, None, None]
        self.chance = np.stack(
            [np.where(places + c < COLD_TOKENS, cold, 1.0) * warm for c in range(COLD_TOKENS + 1)]
        )
        self.survival = np.cumprod(self.chance, axis=-1)
        self.belief = np.zeros((0, 2 * GRID))
        self.outputs: dict[int, int] = {}

    def begin(self, row: int, request: int) -> None:
        """Start a request that was not seen before, with the law of its task as belief."""
        if row >= len(self.belief):
            more = np.zeros((2 * row + 64, 2 * GRID))
            more[: len(self.belief)] = self.belief
            self.belief = more
        self.belief[row] = 1.0 / (2 * GRID)
        self.outputs[request] = 0

    def match_seen(self, rows: Array, match_tokens: Array) -> None:
        """Take the match lengths of now, which are noisy log-odds of the n-gram."""
        found = np.flatnonzero(match_tokens > 0)
        if len(found):
            task = self.latents.task[rows[found]]
            seen = match_log_odds(match_tokens[found])[:, None]
            miss = seen - self.latents.log_odds[task, NGRAM, :1] - self.shift[task]
            self._weigh(rows[found], np.exp(-0.5 * (miss / CONFIDENCE_NOISE) ** 2))

    def drafts_seen(
        self, rows: Array, at: Array, proposer: Array, offered: Array, held: Array
    ) -> None:
        """Take drafts of which the first `held` of `offered` tokens were right."""
        cold = np.minimum(at, COLD_TOKENS)
        chance = self.chance[cold, self.latents.task[rows], :, proposer]
        place = np.arange(chance.shape[2])
        right = np.where(place < held[:, None, None], chance, 1.0).prod(axis=2)
        missed = held < offered
        end = np.minimum(held, chance.shape[2] - 1)
        wrong = 1.0 - np.take_along_axis(chance, end[:, None, None], 2)[:, :, 0]
        self._weigh(rows, right * np.where(missed[:, None], wrong, 1.0))

    def confidence_seen(self, rows: Array, at: Array, proposer: Array, confidence: Array) -> None:
        """Take confidences [n, K], nan none: noisy log-odds of each place's acceptance."""
        depth = min(confidence.shape[1], self.latents.depth)
        cold = np.minimum(at, COLD_TOKENS)
        chance = self.chance[cold, self.latents.task[rows], :, proposer][:, :, :depth]
        seen = logit(np.clip(confidence[:, None, :depth].astype(float), 1e-6, 1.0 - 1e-6))
        miss = np.nan_to_num(seen - logit(np.clip(chance, 1e-6, 1.0 - 1e-6)))
        self._weigh(rows, np.exp(-0.5 * ((miss / CONFIDENCE_NOISE) ** 2).sum(axis=2)))

    def move_on(self, rows: Array, emitted: Array) -> None:
        """Let the phases go on for `emitted` tokens."""
        stay = 0.5 * (1.0 + (1.0 - 2.0 / PHASE_TOKENS) ** emitted)[:, None]
        low, high = self.belief[rows, :GRID], self.belief[rows, GRID:]
        self.belief[rows, :GRID] = stay * low + (1.0 - stay) * high
        self.belief[rows, GRID:] = stay * high + (1.0 - stay) * low

    def expected(self, rows: Array, at: Array) -> Array:
        """Return f64 [n, PROPOSERS, depth]: P(first j hold), as far as can be known."""
        cold, task = np.minimum(at, COLD_TOKENS), self.latents.task[rows]
        out = np.zeros((len(rows), PROPOSERS, self.latents.depth))
        for c, t in {*zip(cold.tolist(), task.tolist(), strict=True)}:
            mine = np.flatnonzero((cold == c) & (task == t))
            flat = self.survival[c, t].reshape(2 * GRID, -1)
            out[mine] = (self.belief[rows[mine]] @ flat).reshape(len(mine), PROPOSERS, -1)
        return out

    def _weigh(self, rows: Array, likelihood: Array) -> None:
        belief = self.belief[rows] * np.maximum(likelihood, _FLOOR)
        self.belief[rows] = belief / belief.sum(axis=1, keepdims=True)


class FilteringOracle(Oracle):
    """Plans on the filter's survivals and the simulator's own costs."""

    def __init__(self, backend: SimBackend, limits: EngineLimits) -> None:
        super().__init__("filtering_oracle", backend, limits, self._survival)
        self.filter = Filter(latents_of(backend))
        self._match = np.zeros(0, np.int32)
        self._rows: dict[int, int] = {}

    def expected(self, view: BatchView) -> Array:
        """Take the match lengths of now, then say what can be known."""
        self._match = view.match_tokens
        rows = self._rows_of(view.request_id)
        self.filter.match_seen(rows, view.match_tokens)
        return super().expected(view)

    def _survival(self, rows: Array, at: Array) -> Array:
        out = self.filter.expected(rows, at)
        out[:, NGRAM] *= (self._match > 0)[:, None]
        return out

    def _rows_of(self, request_id: Array) -> Array:
        for key in request_id.tolist():
            if key not in self._rows:
                self._rows[key] = self.backend.rows[key]
                self.filter.begin(self._rows[key], key)
        return np.array([self._rows[key] for key in request_id.tolist()], np.intp)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from what was drafted and what the n-gram would have done."""
        super().observe(outcome)
        ids = outcome.request_id.tolist()
        outputs = self.filter.outputs
        at = np.array([outputs[key] for key in ids], np.intp)
        rows = self._rows_of(outcome.request_id)
        tried = np.flatnonzero(outcome.verified_k > 0)
        if len(tried):
            who = outcome.proposer[tried].astype(np.intp)
            self.filter.confidence_seen(rows[tried], at[tried], who, outcome.confidences[tried])
            offered, held = outcome.verified_k[tried], outcome.accepted[tried]
            self.filter.drafts_seen(rows[tried], at[tried], who, offered, held.astype(np.intp))
        self._observe_shadow(outcome)
        self.filter.move_on(rows, outcome.emitted.astype(float))
        for key, emitted, end in zip(
            ids, outcome.emitted.tolist(), outcome.truncated_by.tolist(), strict=True
        ):
            outputs[key] += emitted
            if end:
                del outputs[key], self._rows[key]

    def _observe_shadow(self, outcome: StepOutcome) -> None:
        shadow = outcome.shadow
        if not len(shadow):
            return
        keys = shadow.request_id.tolist()
        rows = np.array([self._rows[key] for key in keys], np.intp)
        matched = shadow.matched.astype(np.intp)
        at = np.array([self.filter.outputs[key] for key in keys], np.intp)
        offered = np.where(shadow.observed > matched, matched + 1, matched)
        who = shadow.proposer.astype(np.intp)
        self.filter.drafts_seen(rows, at, who, offered, matched)


def filtering_oracle(backend: SimBackend, limits: EngineLimits) -> FilteringOracle:
    """Return the policy that knows all but the requests' luck."""
    return FilteringOracle(backend, limits)
