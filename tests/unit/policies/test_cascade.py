"""Cascade: short tests of rising k, long sets of the best, off where drafts do not pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS, Machine, play
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import view_of

from parlay.policies.policy import EngineLimits, make_policy
from parlay.policies.types import DRAFT_MODEL, PlanSource

COST = [1.2, 1.5, 2.0]
SETTINGS = {"k": (1, 3, 5), "test_steps": 2, "set_steps": 6}


def ks(accepted: dict[int, int], steps: int, lag: int = 0, cost: list[float] = COST) -> list[int]:
    """Return k step by step of one request that accepts so many tokens at each k."""
    policy: Any = make_policy("cascade", SETTINGS, LIMITS)
    policy.cost = lambda rows, kv_tokens: cost
    found, waiting = [], []
    for step in range(steps):
        view = view_of([1])
        view.step_id = step
        k = int(policy.decide(view).k[0])
        found.append(k)
        outcome = outcome_of(
            np.array([1]), np.full(1, DRAFT_MODEL), np.array([k]), np.array([accepted.get(k, 0)])
        )
        outcome.plan_step_id[:], outcome.plan_source[:] = step, PlanSource.LOCAL
        waiting.append(outcome)
        if len(waiting) > lag:
            policy.observe(waiting.pop(0))
    return found


def test_the_best_utility_is_kept_for_a_long_set() -> None:
    # Utilities 2 / 1.2, 4 / 1.5, 4 / 2: the second is the best.
    one_round = [1, 1, 3, 3, 5, 5] + [3] * 6
    assert ks({1: 1, 3: 3, 5: 3}, 24) == one_round * 2


def test_off_below_one_and_tried_again_after_the_set() -> None:
    assert ks({}, 16) == ([1, 1] + [0] * 6) * 2


def test_a_test_ends_where_utility_no_longer_rises() -> None:
    # 2 / 1.2 against 2 / 1.5: k = 5 is not tried.
    assert ks({1: 1, 3: 1}, 10) == [1, 1, 3, 3] + [1] * 6


def test_late_outcomes_of_an_earlier_phase_do_not_count() -> None:
    lagged = ks({1: 1, 3: 3, 5: 3}, 40, lag=3)
    assert lagged[:5] == [1] * 5, "two steps of a test are heard of five steps later"
    assert lagged[15:24] == [3] * 9, "and six of a set, nine"


def test_cost_is_that_of_a_step_in_which_all_draft_alike() -> None:
    policy: Any = make_policy("cascade", {}, LIMITS)
    play(policy, ["chat"] * 4, 200, machine=Machine(noise=0.0, spikes=0.0))
    a_pass, token_ms, _ = policy.step_time.draft_ms()
    plain, three = policy.step_time.verify_ms(np.array([4.0, 16.0]), 400.0)
    expected = (three + 3 * a_pass + 12 * token_ms[DRAFT_MODEL]) / plain
    assert policy.cost(4, 400.0)[1] == pytest.approx(expected)


@pytest.mark.parametrize(("tag", "drafts"), [("chat", True), ("chat_poor_draft", False)])
def test_a_poor_drafter_is_left_alone_a_good_one_used(tag: str, drafts: bool) -> None:
    policy = make_policy("cascade", {}, LIMITS)
    played = play(policy, [tag] * 4, 300, machine=Machine(draft_pass=0.12))
    late = np.mean([plan.k.mean() for plan in played.plans[100:]])
    assert late > 1.5 if drafts else late < 0.6


def test_a_loaded_cascade_goes_on_alike() -> None:
    policy = make_policy("cascade", {}, LIMITS)
    play(policy, ["chat", "edit"], 45)
    again = make_policy("cascade", {}, LIMITS)
    again.load(policy.state())
    one, two = (play(p, ["chat", "edit"], 30, seed=4).plans for p in (policy, again))
    assert [p.k.tolist() for p in one] == [p.k.tolist() for p in two]
    shallow = make_policy("cascade", {}, EngineLimits(k_max=1))
    third = {**policy.state(), "request_id": np.array([1]), "course": np.array([[2.0, *[0] * 6]])}
    with pytest.raises(ValueError, match="tries other k"):
        shallow.load(third)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"k": (3, 1)}, "k must be one or more numbers that rise"),
        ({"k": (0, 1)}, "k must be between 1 and 64, not 0"),
        ({"test_steps": 0}, "must be 1 or more"),
        ({"set_steps": "x"}, "should be of type int"),
        ({"proposer": "oracle"}, "unknown proposer 'oracle'"),
    ],
)
def test_bad_settings_get_one_clear_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy("cascade", settings, LIMITS)
