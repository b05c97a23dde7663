"""A policy that draws proposers and k anew in every step: the hardest test of a lossless engine."""

from __future__ import annotations

import numpy as np

from parlay.policies.policy import Stateless
from parlay.policies.types import PROPOSERS, BatchView, Plan, Proposer


class RandomPlans(Stateless):
    """Draws each row's proposer from `proposers` and its k from 0..k_max.

    trees: plans have prices at which side branches pay, so that drafts are trees where the engine's
    tree_width lets them.
    """

    name = "random_plans"

    def __init__(
        self, proposers: tuple[Proposer, ...], k_max: int, seed: int, trees: bool = False
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.proposers, self.k_max, self.trees = np.asarray(proposers), k_max, trees

    def decide(self, view: BatchView) -> Plan:
        """Return a plan that history has no part in."""
        rows = len(view)
        plan = Plan(
            request_id=view.request_id,
            proposer=self.rng.choice(self.proposers, rows).astype(np.uint8),
            k=self.rng.integers(0, self.k_max + 1, rows).astype(np.int16),
            shadow=np.zeros(rows, bool),
            propensity=np.ones(rows, np.float32),
            reason=np.zeros(rows, np.uint8),
            step_id=view.step_id,
        )
        if self.trees:
            chain = np.cumprod(np.full(self.k_max, 0.7, np.float32))
            plan.survival = np.broadcast_to(chain, (rows, PROPOSERS, self.k_max)).copy()
            plan.token_value_ms, plan.marginal_token_price_ms = 10.0, 0.02
        return plan
