"""What baselines share that draft deep and leave the end to the plan's stop rule."""

from __future__ import annotations

import dataclasses

from parlay.policies.baselines.rows import batch_plan
from parlay.policies.policy import Stateless
from parlay.policies.types import BatchView, Plan, Proposer, Reason, StopRule


class Stopper(Stateless):
    """Lets the draft model draft up to k tokens for every row, under one stop rule."""

    def __init__(self, name: str, k: int, rule: StopRule) -> None:
        self.name, self.k, self.rule = name, k, rule

    def decide(self, view: BatchView) -> Plan:
        """Return the one plan."""
        return stopped(view, self.k, self.rule)


def stopped(view: BatchView, k: int, rule: StopRule) -> Plan:
    """Return a plan in which every row drafts up to k tokens under a stop rule."""
    plan = batch_plan(view, Proposer.DRAFT_MODEL, k, Reason.HEURISTIC)
    return dataclasses.replace(plan, stop_rule=rule)
