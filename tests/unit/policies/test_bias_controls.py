"""Every policy decodes a world of two tokens through `fit_plan`; the output keeps the target's law.

Two rules that do not are shown to be caught: a gate on the drawn token's own probability (`tetris`
as its source has it), and a budget chosen after the draft was seen.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import plan_of, view_of

from parlay.policies.allocate import fit_plan
from parlay.policies.calibration import calibrated
from parlay.policies.policy import EngineLimits, make_policy, registry
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    Array,
    BatchView,
    Fitted,
    Plan,
    PlanSource,
    StopKind,
)

P = np.array([0.7, 0.3])
FIRST = np.array([0.6, 0.4])
AFTER = np.array([[0.9, 0.1], [0.5, 0.5]])
"""The draft model's law behind each of its own tokens: sure behind the first, else even."""
LIMITS = EngineLimits(0b0111, 6)
ROWS, STEPS, WARM_UP = 256, 30, 310
LEAST_P = 1e-4


@dataclass
class Drafted:
    """count i32 [rows]; tokens [rows, K]; law [rows, K, 2]; peak and own probability, nan n-gram's.

    peak is known before a place's token is drawn, own only behind it.
    """

    count: Array
    tokens: Array
    law: Array
    peak: Array
    own: Array


def draft(plan: Plan, fit: Fitted, rng: np.random.Generator) -> Drafted:
    """Draft each row's k tokens, or up to where the plan's stop rule ends it, as the engine does.

    The n-gram's guess is a token that is certain: the first or the second, by row and place.
    """
    rows, depth, rule = len(fit.k), max(int(fit.k.max(initial=0)), 1), plan.stop_rule
    modelled, row = fit.proposer == DRAFT_MODEL, np.arange(rows)
    out = Drafted(
        np.zeros(rows, np.int32), np.zeros((rows, depth), int), np.zeros((rows, depth, 2)),
        np.full((rows, depth), np.nan, np.float32), np.full((rows, depth), np.nan, np.float32),
    )  # fmt: skip
    lines = np.array([[1.0], [0.0]]) if plan.calibration is None else plan.calibration[DRAFT_MODEL]
    slope, offset = lines.reshape(2, -1).mean(axis=1)
    alive, reach = np.ones(rows, bool), np.ones(rows)
    for place in range(depth):
        law = np.where(place > 0, AFTER[out.tokens[:, place - 1]], FIRST)
        law[~modelled] = np.eye(2)[(row[~modelled] + place) % 2]
        peak = law.max(axis=1)
        reach *= peak if plan.calibration is None else calibrated(peak, slope, offset)
        entropy = -(law * np.log(np.maximum(law, 1e-12))).sum(axis=1)
        stops = np.zeros(rows, bool)
        if rule.kind is StopKind.SURVIVAL:
            stops = reach < rule.threshold
        elif rule.kind is StopKind.ENTROPY and place > 0:
            stops = np.sqrt(0.15 * entropy) > rule.threshold
        alive &= (fit.k > place) & ~(stops & modelled)
        out.tokens[:, place] = rng.random(rows) >= law[:, 0]
        out.law[:, place] = law
        own = law[row, out.tokens[:, place]]
        seen = alive & modelled
        out.peak[seen, place], out.own[seen, place] = peak[seen], own[seen]
        out.count += alive
        if rule.kind is StopKind.PROBABILITY:
            alive &= ~modelled | (own >= rule.threshold)
    return out


def verify(drafted: Drafted, verify_k: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return accepted [rows] and what is emitted [rows, K + 1], by speculative sampling."""
    rows, depth = drafted.tokens.shape
    row = np.arange(rows)
    q = np.take_along_axis(drafted.law, drafted.tokens[:, :, None], axis=2)[:, :, 0]
    holds = rng.random((rows, depth)) < P[drafted.tokens] / q
    holds &= np.arange(depth) < verify_k[:, None]
    accepted = np.cumprod(holds, axis=1).sum(axis=1)
    rest = np.maximum(P - drafted.law[row, np.minimum(accepted, depth - 1)], 0.0)
    rest = np.where((accepted < verify_k)[:, None], rest, P)
    last = rng.random(rows) * rest.sum(axis=1) >= rest[:, 0]
    emitted = np.concatenate([drafted.tokens, np.zeros((rows, 1), int)], axis=1)
    emitted[row, accepted] = last
    return accepted, emitted


class World:
    """Decodes rows under a policy; `triples` holds the first tokens of each row, three by three."""

    def __init__(self, policy: Any, own: bool = False, seed: int = 0) -> None:
        self.policy, self.own, self.rng = policy, own, np.random.default_rng(seed)
        self.step_id = self.bound = 0

    def decode(self, first_id: int, rows: int, steps: int) -> Array:
        """Return how often each of the eight triples was emitted; tokens past `steps` are left."""
        ids, place = np.arange(first_id, first_id + rows), np.zeros(rows, int)
        text = np.zeros((rows, steps + LIMITS.k_max + 1), int)
        for _ in range(steps):
            view = self._view(ids, place)
            accepted, emitted = self._step(view)
            for j in range(emitted.shape[1]):
                at = np.flatnonzero((j <= accepted) & (place + j < text.shape[1]))
                text[at, place[at] + j] = emitted[at, j]
            place = place + accepted + 1
        # Every row has emitted `steps` tokens: taking more of the fast ones would be a selection.
        triples = text[:, : steps - steps % 3].reshape(-1, 3) @ (4, 2, 1)
        return np.bincount(triples, minlength=8)

    def _view(self, ids: Array, place: Array) -> BatchView:
        match = self.rng.integers(0, 9, len(ids)) * (self.rng.random(len(ids)) < 0.4)
        view = view_of(
            ids.tolist(),
            output_tokens=place.astype(np.int32),
            temperature=np.ones(len(ids), np.float32),
            max_k=np.full(len(ids), LIMITS.k_max, np.int32),
            match_tokens=match.astype(np.int32),
            kv_tokens=int(100 * len(ids) + place.sum()),
        )
        view.step_id, self.step_id = self.step_id, self.step_id + 1
        return view

    def _step(self, view: BatchView) -> tuple[Array, Array]:
        plan = self.policy.decide(view)
        fit = fit_plan(plan, view)
        drafted = draft(plan, fit, self.rng)
        told = drafted.own if self.own else drafted.peak
        verify_k = fit_plan(plan, view, drafted.count, told).verify_k
        self.bound += int((verify_k < drafted.count).any())
        accepted, emitted = verify(drafted, verify_k, self.rng)
        self._tell(view, plan, fit, drafted, verify_k, accepted)
        return accepted, emitted

    def _tell(
        self,
        view: BatchView,
        plan: Plan,
        fit: Fitted,
        drafted: Drafted,
        verify_k: Array,
        accepted: Array,
    ) -> None:
        outcome = outcome_of(view.request_id, fit.proposer, verify_k, accepted)
        outcome.requested_k, outcome.drafted_k = fit.k, drafted.count
        outcome.match_tokens, outcome.confidences = view.match_tokens, drafted.peak
        outcome.plan_step_id[:], outcome.plan_source[:] = plan.step_id, PlanSource.LOCAL
        outcome.step_id, outcome.kv_tokens = view.step_id, view.kv_tokens
        outcome.padded_tokens = len(view) + int(verify_k.sum())
        modelled = drafted.count[fit.proposer == DRAFT_MODEL]
        outcome.draft_depth = int(modelled.max(initial=0))
        outcome.draft_ms[DRAFT_MODEL] = 0.3 * outcome.draft_depth
        outcome.verify_ms = 10.0 + 0.1 * outcome.padded_tokens
        outcome.step_ms = outcome.verify_ms + 0.3 * outcome.draft_depth + 0.5
        self.policy.observe(outcome)


def p_value(count: Array) -> float:
    """Return how likely these triples are where tokens follow P one by one."""
    cell = np.arange(8)
    expected = np.prod([P[cell >> bit & 1] for bit in range(3)], axis=0)
    return float(chisquare(count, count.sum() * expected).pvalue)


@pytest.mark.parametrize("name", sorted(registry()))
def test_no_policy_changes_the_targets_law(name: str) -> None:
    world = World(make_policy(name, {}, LIMITS))
    world.decode(10_000, 8, WARM_UP)
    world.bound = 0
    assert p_value(world.decode(0, ROWS, STEPS)) > LEAST_P
    if name in ("tetris", "survival_budget"):
        assert world.bound > STEPS // 2, "confidences had to choose"


def test_tetris_is_biased_once_it_sees_the_tokens_own_probabilities() -> None:
    policy = make_policy("tetris", {}, LIMITS)
    biased = World(policy, own=True).decode(0, ROWS, STEPS)
    assert p_value(biased) < 1e-12
    share = np.array([3, 2, 2, 1, 2, 1, 1, 0]) @ biased / (3 * biased.sum())
    assert share > P[0] + 0.03


def first_tokens(verify_k: Array, tokens: Array, law: Array, rng: np.random.Generator) -> Array:
    """Return how often each token came first."""
    nothing = np.zeros(tokens.shape, np.float32)
    drafted = Drafted(verify_k, tokens, law, nothing, nothing)
    return np.bincount(verify(drafted, verify_k, rng)[1][:, 0], minlength=2)


@pytest.mark.parametrize(("own", "share"), [(True, 0.88), (False, 0.70)])
def test_a_gate_on_the_tokens_own_probability_emits_with_88(own: bool, share: float) -> None:
    rng, rows = np.random.default_rng(1), 40_000
    law = np.broadcast_to(FIRST, (rows, 1, 2))
    tokens = (rng.random((rows, 1)) >= FIRST[0]).astype(int)
    # Room for those tokens and no others whose own probability is at least a half.
    settings = {"k": 1, "capacity_tokens": int((FIRST[tokens] >= 0.5).sum())}
    view = view_of(list(range(rows)))
    plan = make_policy("tetris", settings, LIMITS).decide(view)
    told = FIRST[tokens] if own else np.full((rows, 1), FIRST.max())
    verify_k = fit_plan(plan, view, np.ones(rows, np.int32), told.astype(np.float32)).verify_k
    count = first_tokens(verify_k, tokens, law, rng)
    assert count[0] / rows == pytest.approx(share, abs=0.01)
    assert (chisquare(count, rows * P).pvalue > LEAST_P) == (not own)


THROUGHPUT = np.array([1.0, 0.5, 0.45])
"""Steps in the time of one without drafts, by tokens verified."""
FIRST_HOLDS, SECOND_HOLDS = 0.8, np.array([1.0, 0.0])
"""The drafter is sure of what follows its first token, and that nothing holds behind the other."""


def budget(second_holds: float) -> int:
    """Return the verify budget with the most tokens in a time."""
    tokens = 1.0 + np.cumsum([0.0, FIRST_HOLDS, FIRST_HOLDS * second_holds])
    return int((tokens * THROUGHPUT).argmax())


@pytest.mark.parametrize(("looks", "share"), [(True, 0.85), (False, 0.70)])
def test_a_budget_chosen_by_the_token_emits_with_85(looks: bool, share: float) -> None:
    rng, rows, even = np.random.default_rng(2), 40_000, np.array([0.5, 0.5])
    tokens = rng.integers(0, 2, (rows, 2))
    view, both = view_of([1]), np.array([2])
    admits = []
    for token in (0, 1):
        hopes = float(SECOND_HOLDS[token] if looks else even @ SECOND_HOLDS)
        plan = plan_of([1], [DRAFT_MODEL], [2], budget_tokens=budget(hopes))
        told = np.array([[FIRST_HOLDS, SECOND_HOLDS[token]]], np.float32)
        admits.append(int(fit_plan(plan, view, both, told).verify_k[0]))
    assert admits == ([2, 0] if looks else [0, 0])
    law = np.broadcast_to(even, (rows, 2, 2))
    count = first_tokens(np.array(admits)[tokens[:, 0]], tokens, law, rng)
    assert count[0] / rows == pytest.approx(share, abs=0.01)
    assert (chisquare(count, rows * P).pvalue > LEAST_P) == (not looks)


def test_the_world_drafts_with_both_proposers_and_stops_where_a_rule_says() -> None:
    view = view_of([1, 2, 3, 4])
    plan = plan_of([1, 2, 3, 4], [DRAFT_MODEL] * 3 + [NGRAM], [5, 5, 5, 2])
    fit, rng = fit_plan(plan, view), np.random.default_rng(3)
    free = draft(plan, fit, rng)
    assert free.count.tolist() == [5, 5, 5, 2]
    assert np.isnan(free.peak[3]).all()
    policy = make_policy("ada_edl", {"least_chance": 0.7, "k_max": 6}, LIMITS)
    ruled = dataclasses.replace(plan, stop_rule=policy.decide(view).stop_rule)
    counts = [draft(ruled, fit, rng) for _ in range(50)]
    # Behind the second token the law is even, H = .69: 1 - sqrt(.2 H) is .63, and drafting stops.
    for run in counts:
        for row in range(3):
            stop = int(run.count[row])
            assert (run.tokens[row, : stop - 1] == 0).all()
            assert stop == 5 or run.tokens[row, stop - 1] == 1
