"""An explanation against the plan it explains, and against pricing the options by hand."""

from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pytest
from tests.watching import TaggedHistory

from parlay.policies.explain import (
    BECAUSE,
    BY_GUARD,
    NOTHING_LEFT,
    PROMPT,
    because,
    estimator_of,
    explain,
    words,
)
from parlay.policies.policy import Policy, make_policy
from parlay.policies.synthetic import LIMITS
from parlay.policies.types import NONE, BatchView, Plan, PlanSource, Reason


def learned(
    name: str = "goodput", steps: int = 80, rows: int = 8
) -> tuple[Policy, BatchView, Plan]:
    """Return a policy that has learned, with a view and the plan it made from it."""
    policy, history = make_policy(name, {}, LIMITS), TaggedHistory(rows)
    for _ in range(steps):
        policy.observe(history.step(policy.decide(history.view()), PlanSource.REMOTE))
    view = history.view()
    return policy, view, policy.decide(view)


def test_every_row_is_explained_as_it_was_planned() -> None:
    policy, view, plan = learned()
    assert plan.survival is not None
    assert plan.k.any()
    for row, request in enumerate(plan.request_id.tolist()):
        why = explain(policy, view, plan, request)
        k, proposer = int(plan.k[row]), int(plan.proposer[row])
        assert why.k == k
        assert why.chosen is not None
        assert why.chosen.k == k
        assert why.reason == Reason(int(plan.reason[row]))
        assert why.planned_tokens_per_s == why.chosen.batch_tokens_per_s
        expected = 1.0 + float(plan.survival[row, proposer, :k].sum()) if k else 1.0
        assert why.chosen.tokens == pytest.approx(expected, rel=1e-5)
        rates = [option.batch_tokens_per_s for option in why.options]
        assert rates == sorted(rates, reverse=True)
        assert why.runner_up is None or why.runner_up.proposer != why.proposer
        assert any(option.k == 0 for option in why.options)
        json.dumps(why.as_json(), allow_nan=False)


def test_what_was_chosen_for_its_goodput_is_about_the_best_there_was() -> None:
    policy, view, plan = learned()
    for request in plan.request_id[plan.reason == Reason.BEST_GOODPUT].tolist():
        why = explain(policy, view, plan, request)
        assert why.chosen is not None
        assert why.chosen.batch_tokens_per_s >= 0.98 * why.options[0].batch_tokens_per_s


def test_the_plain_rate_is_one_token_a_row_over_a_step_without_drafts() -> None:
    policy, view, plan = learned()
    core = estimator_of(policy)
    assert core is not None
    decoding = int((view.prefill_tokens == 0).sum())
    step_ms = core.step_time.verify_ms(np.array([decoding]), float(view.kv_tokens))[0]
    why = explain(policy, view, plan, int(plan.request_id[0]))
    assert why.plain_tokens_per_s == pytest.approx(1e3 * decoding / step_ms, rel=0.02)


def test_explaining_changes_no_later_plan() -> None:
    policy, view, plan = learned("pilot")
    other = copy.deepcopy(policy)
    for request in plan.request_id.tolist():
        explain(policy, view, plan, request)
    view = copy.deepcopy(view)
    view.step_id += 1
    ours, theirs = policy.decide(view), other.decide(view)
    np.testing.assert_array_equal(ours.k, theirs.k)
    np.testing.assert_array_equal(ours.proposer, theirs.proposer)


def test_explaining_a_request_that_is_not_known_adds_it_to_no_table() -> None:
    policy, view, plan = learned()
    view, plan = copy.deepcopy(view), copy.deepcopy(plan)
    plan.survival = None
    view.request_id[0] = plan.request_id[0] = 424242
    core = estimator_of(policy)
    assert core is not None
    before = pickle.dumps(core.acceptance)
    assert explain(policy, view, plan, 424242).survival
    assert pickle.dumps(core.acceptance) == before


def test_a_step_that_the_guard_took_is_said_to_be_the_guards() -> None:
    policy, view, plan = learned("pilot")
    plan = copy.deepcopy(plan)
    plan.survival = None
    plan.k[:], plan.proposer[:] = 0, NONE
    why = explain(policy, view, plan, int(plan.request_id[0]))
    assert why.by_guard
    assert "guard" in why.because
    assert why.choice == "draft nothing"
    assert any("guard" in note for note in why.notes)


def test_a_policy_without_estimates_has_a_reason_and_no_options() -> None:
    policy, view, plan = learned("fixed", steps=2)
    why = explain(policy, view, plan, int(plan.request_id[0]))
    assert why.options == []
    assert why.chosen is None
    assert math.isnan(why.plain_tokens_per_s)
    assert why.because == BECAUSE[why.reason]
    assert any("no estimates" in note for note in why.notes)
    assert why.as_json()["plain_tokens_per_s"] is None


def test_a_prompt_is_said_to_be_computed_and_may_draft_nothing() -> None:
    policy, view, _ = learned()
    view.prefill_tokens[3] = 16
    view.step_id += 1
    why = explain(policy, view, policy.decide(view), int(view.request_id[3]))
    assert why.because == "its prompt is being computed"
    assert why.max_k == 0
    assert why.k == 0


def test_a_request_with_nothing_left_to_draft_is_said_to_have_nothing() -> None:
    policy, view, _ = learned()
    view.max_k[2] = 0
    plan = policy.decide(view)
    why = explain(policy, view, plan, int(view.request_id[2]))
    assert plan.reason[2] == Reason.NO_GAIN
    assert why.because == NOTHING_LEFT
    assert why.survival == {}
    others = [explain(policy, view, plan, r) for r in np.delete(view.request_id, 2).tolist()]
    assert all(other.because != NOTHING_LEFT and other.survival for other in others)


@pytest.mark.parametrize(
    ("prompt", "max_k", "guards", "said"),
    [
        (True, 0, True, PROMPT),
        (False, 0, True, NOTHING_LEFT),
        (False, 3, True, BY_GUARD),
        (False, 3, False, BECAUSE[Reason.NO_GAIN]),
    ],
)
def test_what_leaves_no_choice_is_said_first(
    prompt: bool, max_k: int, guards: bool, said: str
) -> None:
    assert because(Reason.NO_GAIN, prompt, max_k, guards) == said


def test_a_request_that_is_not_there_is_refused() -> None:
    policy, view, plan = learned(steps=1)
    with pytest.raises(ValueError, match=r"request 123456789 is not in the plan of step \d+"):
        explain(policy, view, plan, 123456789)


def test_every_reason_has_words() -> None:
    assert set(BECAUSE) == set(Reason)
    assert words("ngram", 1) == "draft 1 token from the n-gram"
    assert words("medusa", 3) == "draft 3 tokens with medusa"
