"""The best proposer of each request, where every one is scored on what was committed.

Source: HedgeSpec (Liu et al. 2025, "Not-a-Bandit", 2510.20064): a verified chunk shows what any
proposer would have had accepted, so nothing is explored. A proposer's value in a step is
sum over k = 1 .. K + 1 of k (1 - g_k) prod over j < k of g_j, g_j its acceptance at place j and
g_{K+1} = 0; NormalHedge (Chaudhuri et al. 2009) draws with weights from the regrets. Feedback comes
when it comes: a regret grows by what the weights of that time would have lost.

What a proposer showed: its verified drafts, and its shadow rows. Places that could not be seen take
the batch's mean, a proposer that showed nothing keeps its last value, an n-gram without a match is
worth the one token that any step brings. The plan asks for a shadow of the draft model where
another drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import check_seed
from parlay.policies.baselines.recent import Recent
from parlay.policies.baselines.rows import check_k, drafter, rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    Array,
    BatchView,
    Plan,
    Reason,
    ShadowKind,
    StepOutcome,
)

_DISCOUNT = 0.99
_HALVINGS = 20
"""Of the interval that c lies in: to a millionth of it."""


@dataclass(slots=True, frozen=True)
class HedgeSpecSettings:
    """proposers to choose among; k, tokens drafted; seed of the draws."""

    proposers: tuple[str, ...] = ("ngram", "draft_model")
    k: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.proposers:
            drafter("hedge_spec", name)
        if len(self.proposers) < 2 or len(set(self.proposers)) != len(self.proposers):
            raise ValueError("hedge_spec: proposers must be two or more, all different")
        check_k("hedge_spec", "k", self.k, least=1)
        check_seed("hedge_spec", self.seed)


def expected_tokens(accept: Array) -> Array:
    """Return the tokens a step should emit, f64 [...], for acceptances g f64 [..., K]."""
    end = np.zeros((*accept.shape[:-1], 1))
    reached = np.cumprod(np.concatenate([end + 1.0, accept], axis=-1), axis=-1)
    stops = 1.0 - np.concatenate([accept, end], axis=-1)
    found: Array = (np.arange(1, accept.shape[-1] + 2) * stops * reached).sum(axis=-1)
    return found


def normal_hedge(regret: Array) -> Array:
    """Return NormalHedge's weights f64 [rows, experts]; even where no regret is above 0.

    Proportional to r / c exp(r^2 / 2c), r the regret or 0, c such that the mean of exp(r^2 / 2c)
    is e.
    """
    half = np.maximum(regret, 0.0) ** 2 / 2.0
    top = half.max(axis=1, keepdims=True)
    high = np.where(top > 0.0, top, 1.0)
    low = high / (1.0 + math.log(regret.shape[1]))
    for _ in range(_HALVINGS):
        c = (low + high) / 2.0
        large = np.exp(half / c).mean(axis=1, keepdims=True) > math.e
        low, high = np.where(large, c, low), np.where(large, high, c)
    weight = np.sqrt(half) * np.exp(half / high)
    weight = np.where(top > 0.0, weight, 1.0)
    found: Array = weight / weight.sum(axis=1, keepdims=True)
    return found


@register("hedge_spec", HedgeSpecSettings)
class HedgeSpec(Stateless):
    """Keeps regret and newest value f64 [2, proposers] of each request, and mean acceptances."""

    name = "hedge_spec"

    def __init__(self, settings: HedgeSpecSettings, limits: EngineLimits) -> None:
        self.proposers = np.array([drafter("hedge_spec", p) for p in settings.proposers], np.uint8)
        self.k, self.seed, self.draws = max(1, min(settings.k, limits.k_max)), settings.seed, 0
        # How many drafts held, and could be seen, by proposer and place.
        self.held, self.seen = np.zeros((2, len(self.proposers), self.k))
        self.known: Recent[Array] = Recent(self._fresh)

    def _mean(self) -> Array:
        """Return the mean acceptance f64 [proposers, K]; a half before anything was seen."""
        return (self.held + 1.0) / (self.seen + 2.0)

    def _fresh(self) -> Array:
        values = expected_tokens(self._mean())
        return np.stack([np.zeros(len(values)), values])

    def decide(self, view: BatchView) -> Plan:
        """Draw each row's proposer."""
        regret = np.array([r[0] for r in self.known.of(view)])
        weight = normal_hedge(regret.reshape(len(view), len(self.proposers)))
        flips = np.random.default_rng((self.seed, self.draws)).random(len(view))
        self.draws += 1
        arm = (flips[:, None] > weight.cumsum(axis=1)[:, :-1]).sum(axis=1)
        k = np.full(len(view), self.k)
        plan = rows_plan(view, self.proposers[arm], k, Reason.EXPLORE)
        plan.propensity[:] = weight[np.arange(len(view)), arm]
        if DRAFT_MODEL in self.proposers:
            plan.shadow[:] = plan.proposer != DRAFT_MODEL
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Score every proposer that showed something, and move the regrets."""
        value = self._values(outcome)
        ids = outcome.request_id.tolist()
        rows = np.flatnonzero((outcome.emitted > 0) & np.isfinite(value).any(axis=1))
        record = {row: self.known.get(ids[row]) for row in rows.tolist()}
        told = [(row, r) for row, r in record.items() if r is not None]
        if not told:
            return
        new = value[[row for row, _ in told]]
        before = np.array([r for _, r in told])
        new = np.where(np.isfinite(new), new, before[:, 1])
        loss = (self.k + 1.0 - new) / self.k
        mean = (normal_hedge(before[:, 0]) * loss).sum(axis=1, keepdims=True)
        for (_, kept), regret, latest in zip(told, before[:, 0] + mean - loss, new, strict=True):
            kept[0], kept[1] = regret, latest

    def _values(self, outcome: StepOutcome) -> Array:
        """Return f64 [rows, proposers]: what each would have brought, nan where nothing shows."""
        rows, shadow = len(outcome), outcome.shadow
        value = np.full((rows, len(self.proposers)), np.nan)
        row_of = {r: i for i, r in enumerate(outcome.request_id.tolist())}
        at = np.array([row_of.get(r, -1) for r in shadow.request_id.tolist()], np.intp)
        self.held, self.seen = self.held * _DISCOUNT, self.seen * _DISCOUNT
        for expert, proposer in enumerate(self.proposers):
            if proposer == NGRAM:
                value[outcome.match_tokens == 0, expert] = 1.0
            mine = np.flatnonzero((shadow.proposer == proposer) & (shadow.observed > 0) & (at >= 0))
            used = np.flatnonzero((outcome.proposer == proposer) & (outcome.verified_k > 0))
            matched = np.concatenate([shadow.matched[mine], outcome.accepted[used]]).astype(float)
            seen = np.concatenate([shadow.observed[mine], outcome.verified_k[used]])
            overlap = np.zeros(len(seen), bool)
            overlap[: len(mine)] = shadow.kind[mine] == ShadowKind.OVERLAP
            accept = self._acceptance(expert, matched, seen, overlap)
            value[np.concatenate([at[mine], used]), expert] = expected_tokens(accept)
        return value

    def _acceptance(self, expert: int, matched: Array, seen: Array, overlap: Array) -> Array:
        """Return g f64 [drafts, K] of one proposer, and learn its means from what was seen."""
        place = np.arange(self.k)
        held = (place < matched[:, None]).astype(float)
        share = (matched / np.maximum(seen, 1))[:, None]
        held = np.where(overlap[:, None], share, held)
        # Behind a rejection nothing is seen; of overlaps every place is.
        reach = np.where(overlap, seen, np.minimum(matched + 1, seen))
        shown = place < reach[:, None]
        self.held[expert] += (held * shown).sum(axis=0)
        self.seen[expert] += shown.sum(axis=0)
        return np.where(shown, held, self._mean()[expert])

    def state(self) -> dict[str, Array]:
        """Return every request's record, the mean acceptances and the count of draws."""
        items, experts = self.known.items(), len(self.proposers)
        return {
            "request_id": np.array([r for r, _ in items], np.uint64),
            "record": np.array([v for _, v in items]).reshape(len(items), 2, experts),
            "held": self.held.copy(),
            "seen": self.seen.copy(),
            "draws": np.asarray(self.draws),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        ids, experts = np.asarray(state.get("request_id", ())).tolist(), len(self.proposers)
        fits = set(state) == set(self.state()) and np.shape(state["held"]) == self.held.shape
        if not fits or np.shape(state["record"]) != (len(ids), 2, experts):
            raise ValueError("hedge_spec: the state is of another policy, k or set of proposers")
        self.known.load(ids, list(np.array(state["record"], float)))
        self.held, self.seen = np.array(state["held"]), np.array(state["seen"])
        self.draws = int(state["draws"])
