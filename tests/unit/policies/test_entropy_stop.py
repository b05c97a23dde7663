"""AdaEDL's rule, said as a plan's entropy rule, stops exactly where the source stops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS
from tests.unit.policies.test_allocate import view_of

from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, StopKind


@pytest.mark.parametrize("least_chance", [0.05, 0.4, 0.654, 0.95])
def test_the_plans_rule_stops_where_the_source_does(least_chance: float) -> None:
    policy = make_policy("ada_edl", {"least_chance": least_chance}, LIMITS)
    rule = policy.decide(view_of([1])).stop_rule
    assert rule.kind is StopKind.ENTROPY
    entropy = np.linspace(0.0, 8.0, 4001)
    stops = np.sqrt(0.15 * entropy) > rule.threshold
    np.testing.assert_array_equal(stops, 1.0 - np.sqrt(0.2 * entropy) < least_chance)
    assert rule.threshold == pytest.approx((1.0 - least_chance) * math.sqrt(0.75))


def test_it_drafts_deep_and_leaves_the_end_to_the_rule() -> None:
    plan = make_policy("ada_edl", {"k_max": 6}, LIMITS).decide(view_of([1, 2]))
    assert plan.k.tolist() == [6, 6]
    assert set(plan.proposer) == {DRAFT_MODEL}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"least_chance": 1.0}, "least_chance must be between 0 and 1, not 1.0"),
        ({"least_chance": "nan"}, "least_chance must be between 0 and 1"),
        ({"k_max": 0}, "k_max must be between 1 and 64, not 0"),
    ],
)
def test_bad_settings_get_one_clear_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy("ada_edl", settings, LIMITS)
