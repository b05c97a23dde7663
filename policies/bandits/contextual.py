"""What contextual bandits share: features of a request, linear rewards, and arms a row may pull."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.bandits.arms import Arm
from parlay.policies.types import NONE, Array, BatchView, StepOutcome

FEATURES = 7
_PENDING_STEPS = 64
_RIDGE = 1.0
_UNIT_WEIGHT = 0.05


def features(view: BatchView) -> Array:
    """Return f64 [rows, FEATURES], each about 0 to 1.

    One; context and output length; the n-gram's match; recent tokens a step; temperature; how many
    run.
    """
    running = max(view.running, len(view), 1)
    columns = (
        np.ones(len(view)),
        np.log1p(view.context_tokens) / 10.0,
        np.log1p(view.output_tokens) / 8.0,
        np.log1p(np.minimum(view.match_tokens, 63)) / 4.0,
        np.minimum(view.recent_accept, 8.0) / 8.0,
        np.minimum(view.temperature, 2.0) / 2.0,
        np.full(len(view), np.log2(running) / 8.0),
    )
    return np.stack(columns, axis=1).astype(float)


def allowed(view: BatchView, arms: tuple[Arm, ...]) -> Array:
    """Return bool [rows, arms]: which arms a row may pull; not drafting, always."""
    return np.stack(
        [np.ones(len(view), bool) if p == NONE else view.allows(p) for p, _ in arms], axis=1
    )


@dataclass(slots=True)
class Pull:
    """What one step's plan pulled: request_id u64, arm i64 and features f64, a row each."""

    request_id: Array
    arm: Array
    x: Array


class LinearArms:
    """Ridge regressions, one an arm, of a row's tokens a millisecond on its features.

    gram f64 [arms, d, d] and moment [arms, d]. Rewards are relative to their own running mean: a
    faster machine has the same ones, and an arm that is not known is thought to be an average one.
    """

    def __init__(self, arms: int) -> None:
        self.gram = np.tile(_RIDGE * np.eye(FEATURES), (arms, 1, 1))
        self.moment = np.zeros((arms, FEATURES))
        self.unit = 0.0
        self._pulls: OrderedDict[int, Pull] = OrderedDict()

    def weights(self) -> tuple[Array, Array]:
        """Return the estimates [arms, d] and the inverse grams [arms, d, d]."""
        inverse = np.linalg.inv(self.gram)
        return np.einsum("aij,aj->ai", inverse, self.moment), inverse

    def pulled(self, step_id: int, pull: Pull) -> None:
        """Keep what the plan of step_id pulled, until its outcome comes."""
        self._pulls[step_id] = pull
        while len(self._pulls) > _PENDING_STEPS:
            self._pulls.popitem(last=False)

    def learn(self, outcome: StepOutcome) -> None:
        """Learn from rows that followed a plan of ours: the row's tokens times rows over ms."""
        if not 0.0 < outcome.step_ms < np.inf:
            return
        reward = outcome.emitted * len(outcome) / outcome.step_ms
        for row in np.flatnonzero(outcome.emitted > 0):
            pull = self._pulls.get(int(outcome.plan_step_id[row]))
            if pull is None:
                continue
            at = np.flatnonzero(pull.request_id == outcome.request_id[row])
            if not len(at):
                continue
            self.unit += (_UNIT_WEIGHT if self.unit else 1.0) * (float(reward[row]) - self.unit)
            x, arm = pull.x[at[0]], pull.arm[at[0]]
            self.gram[arm] += np.outer(x, x)
            self.moment[arm] += x * (float(reward[row]) / self.unit - 1.0)

    def state(self) -> dict[str, Array]:
        """Return everything that later estimates depend on, but for outcomes still to come."""
        return {
            "gram": self.gram.copy(),
            "moment": self.moment.copy(),
            "unit": np.asarray(self.unit),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a checked state."""
        self.gram, self.moment = np.array(state["gram"]), np.array(state["moment"])
        self.unit = float(state["unit"])
