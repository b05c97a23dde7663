"""Our estimators beside the Open Bandit Pipeline's (Saito et al. 2020, arXiv:2008.07146).

The figures are those that obp 0.4.1 itself gave for the log drawn below: estimate_policy_value of
each class named, with `pscore` the propensities and `action_dist` the wanted probabilities. It is
not run here, because it pins packages that this project does not use.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from parlay.policies.estimators import doubly_robust, ips, snips
from parlay.policies.types import Array

ROUNDS, ACTIONS = 400, 5
IPW = 3.1835431710355646
"""InverseProbabilityWeighting."""
SNIPW = 3.2176971121132683
"""SelfNormalizedInverseProbabilityWeighting."""
DR = 3.0319271748827323
"""DoublyRobust."""
DM = 3.011554685389562
"""DirectMethod."""
REPLAY = 3.3382352941176467
"""ReplayMethod, for the policy that takes the likeliest wanted action."""


class Log(NamedTuple):
    """wanted and model [ROUNDS, ACTIONS]: the other policy's chances, a model's rewards."""

    wanted: Array
    model: Array
    action: Array
    reward: Array
    propensity: Array

    def of_logged(self, table: Array) -> Array:
        return table[np.arange(ROUNDS), self.action]


@pytest.fixture(scope="module")
def log() -> Log:
    rng = np.random.default_rng(20)
    logged = rng.dirichlet(np.ones(ACTIONS) * 2.0, ROUNDS)
    wanted = rng.dirichlet(np.ones(ACTIONS), ROUNDS)
    action = (rng.random((ROUNDS, 1)) > np.cumsum(logged, axis=1)).sum(axis=1)
    reward = 1.0 + rng.binomial(4, 0.2 + 0.15 * action)
    noise = 0.2 * rng.standard_normal((ROUNDS, ACTIONS))
    model = np.clip(1.8 + 0.6 * np.arange(ACTIONS) + noise, 1.0, 5.0)
    # The figures are of this log; another generator's would be another one.
    assert (reward.sum(), action.sum()) == (1267.0, 871)
    return Log(wanted, model, action, reward, logged[np.arange(ROUNDS), action])


def test_propensity_scores_weigh_as_theirs(log: Log) -> None:
    weight = log.of_logged(log.wanted) / log.propensity
    assert ips(log.reward, weight) == pytest.approx(IPW, rel=1e-12)
    assert snips(log.reward, weight) == pytest.approx(SNIPW, rel=1e-12)


def test_the_direct_and_the_doubly_robust_estimate_are_theirs(log: Log) -> None:
    weight = log.of_logged(log.wanted) / log.propensity
    direct = (log.wanted * log.model).sum(axis=1)
    assert direct.mean() == pytest.approx(DM, rel=1e-12)
    found = doubly_robust(log.reward, weight, direct, log.of_logged(log.model)).mean()
    assert found == pytest.approx(DR, rel=1e-12)


def test_replay_is_weighing_by_agreement(log: Log) -> None:
    agrees = (log.action == log.wanted.argmax(axis=1)).astype(float)
    assert snips(log.reward, agrees) == pytest.approx(REPLAY, rel=1e-12)
