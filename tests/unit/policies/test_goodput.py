"""The goodput policy on synthetic requests: never much below no speculation or the best static."""

import dataclasses
import functools

import numpy as np
import pytest
from tests.unit.policies.synthetic import (
    LIMITS,
    Machine,
    Played,
    Request,
    make_request,
    play,
    step,
    view_of,
)

from parlay.policies.allocate import fit_plan
from parlay.policies.goodput import Goodput, GoodputSettings
from parlay.policies.policy import EngineLimits, Policy, make_policy
from parlay.policies.solver import usable
from parlay.policies.synthetic import History
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    NO_BUDGET,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    Reason,
    StepOutcome,
)

STATICS: list[tuple[str, dict[str, object]]] = [
    ("none", {}),
    ("fixed", {"proposer": "ngram", "k": 3}),
    ("fixed", {"proposer": "ngram", "k": 7}),
    ("fixed", {"proposer": "draft_model", "k": 1}),
    ("fixed", {"proposer": "draft_model", "k": 3}),
    ("ngram_gate", {}),
]
CELLS = {
    "chat_1": ["chat"],
    "chat_16": ["chat"] * 16,
    "edit_1": ["edit"],
    "edit_16": ["edit"] * 16,
    "hostile_16": ["hostile"] * 16,
    "poor_draft_1": ["chat_poor_draft"],
    "poor_draft_16": ["chat_poor_draft"] * 16,
    "mix_4": ["edit", "chat", "logs", "hostile"],
    "mix_16": ["edit", "chat", "logs", "hostile"] * 4,
}
STEPS = 250


def goodput(limits: EngineLimits = LIMITS) -> Goodput:
    return Goodput(GoodputSettings(), limits)


@functools.cache
def rate(name: str, number: int, cell: str) -> float:
    """Return tokens/s from a cold start over two seeds."""
    policies: list[Policy] = [
        goodput() if name == "goodput" else make_policy(*STATICS[number], LIMITS) for _ in range(2)
    ]
    rates = [play(p, CELLS[cell], STEPS, seed).tokens_per_s for seed, p in enumerate(policies)]
    return float(np.mean(rates))


QUICK = ("chat_1", "edit_16", "hostile_16", "mix_16")
MARKED = [cell if cell in QUICK else pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS]


@pytest.mark.parametrize("cell", MARKED)
def test_from_cold_it_keeps_up_with_none_and_the_best_static(cell: str) -> None:
    statics = [rate("static", number, cell) for number in range(len(STATICS))]
    ours = rate("goodput", 0, cell)
    assert ours >= 0.97 * statics[0]
    assert ours >= 0.97 * max(statics)


@pytest.mark.slow
def test_over_all_cells_it_beats_every_static_by_far() -> None:
    ours = np.mean([rate("goodput", 0, cell) / rate("static", 0, cell) for cell in CELLS])
    for number in range(len(STATICS)):
        ratios = [rate("static", number, cell) / rate("static", 0, cell) for cell in CELLS]
        assert ours > 1.1 * np.mean(ratios)
    assert ours > 1.4


def drafted_by(played: Played, first: int) -> Array:
    total: Array = np.sum(played.drafted[first:], axis=0)
    return total


def test_it_finds_the_proposer_that_pays() -> None:
    chat = drafted_by(play(goodput(), ["chat"] * 4, 200), 100)
    edit = drafted_by(play(goodput(), ["edit"] * 4, 200), 100)
    assert chat[DRAFT_MODEL] > 3 * chat[NGRAM]
    assert edit[NGRAM] > 10 * edit[DRAFT_MODEL]


def test_k_shrinks_as_the_batch_grows() -> None:
    small = play(goodput(), ["edit"] * 2, 150)
    large = play(goodput(), ["edit"] * 32, 150)
    per_row = [drafted_by(p, 50).sum() / n for p, n in ((small, 2), (large, 32))]
    assert per_row[0] > 1.3 * per_row[1]


@pytest.mark.parametrize(("rows", "steps"), [(8, 600), (16, 1600)])
def test_tries_are_blocks_of_the_batch_and_their_cost_is_bounded(rows: int, steps: int) -> None:
    policy = goodput()
    played = play(policy, ["hostile"] * rows, steps)
    tries = [int((plan.reason == Reason.EXPLORE).sum()) for plan in played.plans]
    at = np.flatnonzero(tries)
    assert len(at)
    assert all(tries[i] >= 4 for i in at)
    gaps = np.diff(at)
    assert gaps[gaps > 1].min() >= 30
    late = [plan for plan in played.plans[300:] if not (plan.reason == Reason.EXPLORE).any()]
    assert np.mean([plan.k.sum() for plan in late]) < 1
    assert policy.explorer.spent_ms < 0.03 * policy.explorer.elapsed_ms


def test_a_draft_model_that_gets_better_is_taken_back() -> None:
    policy = goodput()
    play(policy, ["chat_poor_draft"] * 4, 200)
    assert drafted_by(play(policy, ["chat"] * 4, 400, seed=5), 300)[DRAFT_MODEL] > 100


def test_without_a_draft_model_none_is_drafted_with() -> None:
    limits = dataclasses.replace(LIMITS, proposer_mask=0b0011)
    played = play(Goodput(GoodputSettings(), limits), ["edit", "chat"], 150, limits=limits)
    assert drafted_by(played, 0)[DRAFT_MODEL] == 0
    assert drafted_by(played, 0)[NGRAM] > 0


def test_an_expensive_draft_model_is_left_alone() -> None:
    machine = dataclasses.replace(Machine(), draft_pass=0.8)
    policy = goodput()
    played = play(policy, ["chat"] * 4, 300, machine=machine)
    plain = play(make_policy("none", {}, LIMITS), ["chat"] * 4, 300, machine=machine)
    tried = np.mean([d[DRAFT_MODEL] > 0 for d in played.drafted[100:]])
    assert tried < 0.1
    assert played.tokens_per_s > 0.97 * plain.tokens_per_s


def test_plans_stay_on_bucket_edges() -> None:
    limits = dataclasses.replace(LIMITS, bucket_edges=(1, 2, 4, 8, 16, 24, 32, 48, 64))
    played = play(goodput(limits), ["edit", "chat"] * 4, 120, limits=limits)
    plans = [plan for plan in played.plans[20:] if plan.k.any()]
    assert all(plan.budget_tokens == plan.k.sum() for plan in plans)
    on_edge = np.mean([8 + int(plan.k.sum()) in limits.bucket_edges for plan in plans])
    assert on_edge > 0.5


def test_a_plan_fits_its_own_batch_unchanged() -> None:
    policy, rng = goodput(), np.random.default_rng(0)
    requests = [make_request(0, n, tag) for n, tag in enumerate(["edit", "chat", "logs"] * 4)]
    for step_id in range(12):
        view = view_of(requests, step_id)
        plan = policy.decide(view)
        fit = fit_plan(plan, view)
        assert fit.k.tolist() == plan.k.tolist()
        assert fit.proposer.tolist() == plan.proposer.tolist()
        assert plan.budget_tokens == NO_BUDGET
        policy.observe(step(requests, view, plan, Machine(), rng))


def warmed(tag: str, rows: int, steps: int) -> tuple[Goodput, list[Request]]:
    """Return the policy after so many steps of requests that all decode, and those."""
    policy, rng = goodput(), np.random.default_rng(0)
    requests = [make_request(0, n, tag) for n in range(rows)]
    for step_id in range(steps):
        view = view_of(requests, step_id)
        policy.observe(step(requests, view, policy.decide(view), Machine(), rng))
    return policy, requests


@pytest.mark.parametrize(("tag", "steps"), [("chat", 40), ("chat", 20), ("edit", 20), ("logs", 20)])
def test_a_stale_price_of_a_step_of_prompts_lets_no_deep_draft_through(
    tag: str, steps: int
) -> None:
    """The plan of such a step has a price all the same: the next may use it for other rows."""
    policy, requests = warmed(tag, 16, steps)
    full = view_of(requests, steps)
    full.prefill_tokens[3:] = LIMITS.token_budget
    plan = policy.decide(full)
    really = np.diff(policy.costs(full).verify_ms)[1:].mean()
    assert plan.marginal_token_price_ms >= 0.8 * really > 0.0
    after = view_of(requests, steps + 1)
    assert fit_plan(plan, after).k.sum() <= policy.decide(after).k.sum() + 8


def test_rows_draft_beside_prompts_that_fill_the_step() -> None:
    """Drafts come on top of a step's prompts: all that they cost is what they add to it."""
    policy, requests = warmed("edit", 4, 20)
    full = view_of(requests, 20)
    full.prefill_tokens[3] = LIMITS.token_budget
    plan = policy.decide(full)
    assert plan.k[:3].any()
    assert plan.k[3] == 0


def test_a_batch_that_fills_up_is_not_planned_as_a_small_one() -> None:
    policy, requests = warmed("chat", 16, 40)
    filling = view_of(requests, 40)
    filling.prefill_tokens[2:] = 4
    whole = policy.decide(view_of(requests, 40))
    assert policy.decide(filling).token_value_ms <= 1.3 * whole.token_value_ms


def same(one: Plan, other: Plan) -> bool:
    assert one.survival is not None
    assert other.survival is not None
    return (
        one.k.tolist() == other.k.tolist()
        and one.proposer.tolist() == other.proposer.tolist()
        and np.array_equal(one.survival, other.survival)
        and one.token_value_ms == other.token_value_ms
        and one.marginal_token_price_ms == other.marginal_token_price_ms
    )


def catches_up(view: BatchView, outcome: StepOutcome) -> bool:
    return bool((view.draft_kv_lag[outcome.proposer == DRAFT_MODEL] > 2).any())


@pytest.mark.parametrize(
    ("tags", "first", "caught"),
    [
        (["edit", "chat", "hostile", "chat_poor_draft"], 1, False),
        (["edit", "chat", "hostile", "chat_poor_draft"], 130, False),
        (["edit", "chat"], 20, True),
        (["hostile"] * 4, 30, False),
    ],
)
def test_a_loaded_state_goes_on_with_the_same_decisions(
    tags: list[str], first: int, caught: bool
) -> None:
    policy, other, rng = goodput(), goodput(), np.random.default_rng(0)
    requests, number = [make_request(0, n, tag) for n, tag in enumerate(tags)], len(tags)
    loaded_at = -1
    for step_id in range(250):
        view = view_of(requests, step_id)
        plan = policy.decide(view)
        if loaded_at >= 0:
            assert same(plan, other.decide(view))
        outcome = step(requests, view, plan, Machine(), rng)
        if loaded_at < 0 and step_id >= first and (catches_up(view, outcome) or not caught):
            # In the middle of a step: what was decided counts as well as what was learned.
            other.load({key: value.copy() for key, value in policy.state().items()})
            loaded_at = step_id
        policy.observe(outcome)
        if loaded_at >= 0:
            other.observe(outcome)
        for place, request in enumerate(requests):
            if request.position >= request.length:
                requests[place] = make_request(0, number, request.tag)
                number += 1
    assert 0 <= loaded_at < 200
    theirs = other.state()
    for key, value in policy.state().items():
        assert np.array_equal(value, theirs[key]), key


def test_the_same_history_gives_the_same_plans() -> None:
    one, two = (play(goodput(), ["edit", "chat"], 80) for _ in range(2))
    assert all(same(a, b) for a, b in zip(one.plans, two.plans, strict=True))


def test_a_state_that_does_not_fit_is_refused() -> None:
    policy = goodput()
    with pytest.raises(ValueError, match="the state lacks"):
        policy.load({})
    with pytest.raises(ValueError, match="k_max"):
        policy.load(Goodput(GoodputSettings(k_max=4), LIMITS).state())


def test_tries_that_could_not_change_the_plan_are_not_made() -> None:
    """Once a draft model is known to be hopeless it is left alone, until it may have drifted."""
    machine = dataclasses.replace(Machine(), draft_pass=0.5)
    policy = goodput()
    play(policy, ["hostile"] * 8, 200, machine=machine)
    known = drafted_by(play(policy, ["hostile"] * 8, 150, machine=machine, seed=3), 0)
    assert known[DRAFT_MODEL] == 0
    assert policy.explorer.quiet_steps[DRAFT_MODEL] > 150


def test_hopes_shrink_with_evidence_and_grow_with_time() -> None:
    policy = goodput()
    ids, task = np.array([10**6], np.uint64), np.array([7], np.uint32)

    def hope(quiet_steps: int) -> float:
        rows = policy.acceptance.rows_of(ids, task)
        frailty = policy.acceptance.frailty(rows)
        least = policy.acceptance.least_frailty(rows, frailty, DRAFT_MODEL, quiet_steps)
        assert least[0, NGRAM] == frailty[0, NGRAM]
        return float(least[0, DRAFT_MODEL] / frailty[0, DRAFT_MODEL])

    ignorant = hope(0)
    play(policy, ["chat"] * 4, 150)
    ids, task = ids + np.uint64(1), policy_task(policy)
    informed = hope(0)
    assert ignorant < informed < 1.0
    assert hope(5000) < informed


def policy_task(policy: Goodput) -> Array:
    """Return the task whose drafts were seen most."""
    rejected = policy.acceptance.state()["task_counts"][0, :, DRAFT_MODEL]
    ids = policy.acceptance.state()["task_id"]
    return np.array([ids[rejected.argmax()]], np.uint32)


def test_one_proposer_alone_is_estimated_as_among_all() -> None:
    limits = EngineLimits(proposer_mask=0b1111, k_max=8)
    policy, history = goodput(limits), History(6, limits=limits)
    for _ in range(30):
        policy.observe(history.step(policy.decide(history.view())))
    view, learner = history.view(), policy.acceptance
    view.match_tokens[:3], view.match_tokens[3:] = 4, 0
    frailty = np.random.default_rng(2).uniform(0.2, 3.0, (6, PROPOSERS))
    every = learner.survival(frailty, view.match_tokens)
    allowed = usable(view, every)
    assert allowed[:, 1:].any(axis=(0, 2)).all()
    for proposer in range(1, PROPOSERS):
        alone = learner.survival(frailty, view.match_tokens, proposer)
        np.testing.assert_array_equal(alone[:, 0], every[:, proposer])
        mine = usable(view, alone, proposer)
        np.testing.assert_array_equal(mine[:, 0], allowed[:, proposer])
