"""The staircase at the start: a few steps that teach the verify curve where it can matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS, Machine, play

from parlay.policies.pilot import Pilot, PilotSettings
from parlay.policies.policy import Policy
from parlay.policies.types import Reason

TAGS = ["edit", "logs", "chat", "edit"] * 8


@dataclass(frozen=True)
class Gpu(Machine):
    """Verifying is free up to a knee of 400 tokens, and takes in proportion from there."""

    knee_tokens: int = 400

    def verify_ms(self, tokens: int, kv_tokens: int) -> float:
        return self.one_token_ms * max(1.0 + 1e-4 * tokens, tokens / self.knee_tokens)


class Steep(Machine):
    """Every token takes as long as the first."""

    def verify_ms(self, tokens: int, kv_tokens: int) -> float:
        return self.one_token_ms * (0.5 + 0.5 * tokens)


GPU = Gpu(one_token_ms=8.0, draft_pass=0.08, noise=0.02, spikes=0.0)


def pilot(stairs: bool = True) -> Pilot:
    policy = Pilot(PilotSettings(k_max=8), LIMITS)
    if not stairs:
        policy.staircase.tries[:] = 99
    return policy


def rungs(policy: Policy, machine: Machine, steps: int, tags: list[str] = TAGS) -> list[int]:
    """Return the steps that were rungs."""
    plans = play(policy, tags, steps, machine=machine).plans
    return [i for i, plan in enumerate(plans) if (plan.reason == Reason.WARM_UP).any()]


def test_a_start_on_a_flat_curve_is_faster_for_it() -> None:
    ratio = []
    for seed in range(4):
        speed = [play(pilot(stairs), TAGS, 40, seed, GPU).tokens_per_s for stairs in (True, False)]
        ratio.append(speed[0] / speed[1])
    print("start", ratio)
    assert np.mean(ratio) > 1.01


def test_it_ends_after_a_few_steps_and_costs_nothing_later() -> None:
    found = rungs(pilot(), GPU, 300)
    assert 1 <= len(found) <= 10
    assert found[-1] < 60
    ratio = [
        play(pilot(), TAGS, 400, seed, GPU).tokens_per_s
        / play(pilot(stairs=False), TAGS, 400, seed, GPU).tokens_per_s
        for seed in range(2)
    ]
    assert np.mean(ratio) > 0.995


@pytest.mark.parametrize("machine", [Machine(), Steep()], ids=["cpu", "steep"])
def test_where_tokens_are_dear_it_costs_next_to_nothing(machine: Machine) -> None:
    ratio = []
    for seed in range(3):
        speed = [
            play(pilot(stairs), TAGS, 60, seed, machine).tokens_per_s for stairs in (True, False)
        ]
        ratio.append(speed[0] / speed[1])
    assert np.mean(ratio) > 0.99


def test_nothing_is_tried_that_could_change_no_decision() -> None:
    assert len(rungs(pilot(), Machine(), 120, ["hostile"] * 8)) <= 2


def test_the_steps_are_bounded_by_what_they_may_cost() -> None:
    policy = pilot()
    play(policy, TAGS, 200, machine=Steep())
    stairs = policy.staircase
    assert stairs.spent_ms <= 3.0 * stairs.mean_ms * 1.5 + 0.002 * stairs.elapsed_ms
    assert stairs.tries.max() <= 2


def test_a_batch_that_grows_stays_within_the_bound() -> None:
    policy = pilot()
    small = rungs(policy, GPU, 40, TAGS[:2])
    grown = rungs(policy, GPU, 120, TAGS)
    assert len(small) + len(grown) <= 16


def test_saved_and_loaded_it_climbs_on_alike() -> None:
    one, two = pilot(), pilot()
    play(one, TAGS, 4, machine=GPU)
    two.load({key: np.array(value) for key, value in one.state().items()})
    plans = [play(policy, TAGS, 20, 3, GPU).plans for policy in (one, two)]
    for left, right in zip(*plans, strict=True):
        assert (left.k == right.k).all()
        assert (left.reason == right.reason).all()
    with pytest.raises(ValueError, match="staircase"):
        two.load({k: v for k, v in one.state().items() if k != "stairs.tries"})
