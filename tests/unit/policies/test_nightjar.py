"""Nightjar: bins that double, a price on beginning to draft, a k for each batch size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import view_of

from parlay.policies.bandits.nightjar import bins_of, cheapest
from parlay.policies.policy import make_policy
from parlay.policies.types import Array, PlanSource


def test_blocks_double_and_bins_are_their_square_root() -> None:
    assert [bins_of(j) for j in (1, 2, 3, 4, 5, 7)] == [
        (1, 1), (1, 2), (2, 2), (3, 3), (4, 4), (8, 8),
    ]  # fmt: skip
    for block in range(1, 15):
        bins, steps = bins_of(block)
        assert steps == math.ceil(math.sqrt(2 ** (block - 1)))
        assert bins == math.ceil(2 ** (block - 1) / steps)


def test_beginning_to_draft_must_earn_its_price() -> None:
    rate, k = np.array([0.100, 0.110, 0.105]), np.array([0, 1, 4])
    # Per token 10, 9.09 and 9.52 ms; beginning takes 2 ms over 1 or 4 tokens.
    assert cheapest(rate, k, before=1, switch_ms=2.0) == 1
    assert cheapest(rate, k, before=0, switch_ms=0.0) == 1
    assert cheapest(rate, k, before=0, switch_ms=1.0) == 2
    assert cheapest(rate, k, before=0, switch_ms=2.0) == 0
    assert cheapest(np.array([0.1, np.inf, 0.1]), k, before=1, switch_ms=9.0) == 1


def decode(policy: Any, rows: int, steps: int, token_ms: float, first: int = 0) -> Array:
    """Return k i64 [steps] for a drafter that holds .8, at 10 ms a step and so much a token."""
    rng, ks = np.random.default_rng(rows), []
    for step in range(first, first + steps):
        view = view_of(list(range(rows)))
        view.step_id = step
        plan = policy.decide(view)
        k = int(plan.k[0])
        held = np.cumprod(rng.random((rows, 6)) < 0.8, axis=1).sum(axis=1)
        outcome = outcome_of(view.request_id, plan.proposer, plan.k, np.minimum(held, k))
        outcome.plan_step_id[:], outcome.plan_source[:] = step, PlanSource.LOCAL
        outcome.step_ms = 10.0 + token_ms * rows * k
        policy.observe(outcome)
        ks.append(k)
    return np.array(ks)


def test_each_range_of_batch_sizes_learns_its_own_k() -> None:
    policy = make_policy("nightjar", {"switch_ms": 0.1}, LIMITS)
    few, many = decode(policy, 2, 2048, 0.2), decode(policy, 48, 2048, 0.2, first=2048)
    # 2.95 to 3.36 tokens in 11.2 to 12 ms for 3 to 5 against 1 in 10; 1.8 in 19.6 ms at 48.
    assert (few[-512:] >= 3).mean() > 0.6
    assert (many[-512:] == 0).mean() > 0.6
    assert len(set(few[:128])) == 6, "every k is tried"


def test_a_bin_keeps_its_k_and_says_how_likely_it_was() -> None:
    policy: Any = make_policy("nightjar", {}, LIMITS)
    ks = decode(policy, 2, 511, 0.2)
    at = sum(2 ** (j - 1) for j in range(1, 9)) + sum(b * s - 2 ** (j - 1) for j in range(1, 9)
                                                      for b, s in [bins_of(j)])  # fmt: skip
    for start in range(at, 511 - 16, bins_of(9)[1]):
        assert len(set(ks[start : start + 16].tolist())) == 1
    plan = policy.decide(view_of([1, 2]))
    assert 0.0 < plan.propensity[0] <= 1.0
    explore = 1 / math.sqrt(policy.bin[1])
    assert plan.propensity[0] == pytest.approx(explore / 6, rel=1e-5) or plan.propensity[
        0
    ] == pytest.approx(1 - explore * 5 / 6, rel=1e-5)


def test_a_loaded_nightjar_goes_on_alike_and_an_idle_engine_moves_nothing() -> None:
    policy, again = (make_policy("nightjar", {}, LIMITS) for _ in range(2))
    decode(policy, 3, 200, 0.2)
    before = policy.state()
    policy.decide(view_of([]))
    np.testing.assert_array_equal(policy.state()["bins"], before["bins"])
    again.load(before)
    assert decode(again, 3, 60, 0.2, 300).tolist() == decode(policy, 3, 60, 0.2, 300).tolist()
    with pytest.raises(ValueError, match="with 2 arms"):
        make_policy("nightjar", {"k": (0, 1)}, LIMITS).load(before)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"k": (2,)}, "k must be two or more numbers that rise"),
        ({"k": "3,0"}, "k must be two or more numbers that rise"),
        ({"k": (0, 65)}, "k must be between 0 and 64, not 65"),
        ({"switch_ms": -1.0}, "switch_ms must be 0 or more"),
        ({"switch_ms": float("nan")}, "switch_ms must be 0 or more"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_bad_settings_get_one_clear_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy("nightjar", settings, LIMITS)
