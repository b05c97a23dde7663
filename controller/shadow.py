"""A candidate that decides beside the incumbent: how often both agree, what it would have earned.

The value is estimated off-policy from the newest steps (`policies.evaluate`), with the plans that
the candidate really made from each step's view; it screens candidates, switch-back blocks decide.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from parlay.controller.candidate import Candidate
from parlay.controller.heard import HeardStep, heard_rows
from parlay.policies.allocate import fit_plan
from parlay.policies.evaluate import Estimate, evaluate
from parlay.policies.log_schema import LoggedStep, steps_of
from parlay.policies.policy import Stateless
from parlay.policies.replay import StepMs, learned_cost
from parlay.policies.types import BatchView, Plan

MOST_STEPS, MOST_ROWS = 1024, 8192
"""Newest steps, and rows in them, kept of each engine for the estimate."""
_PLANS = 64


@dataclass(slots=True, frozen=True)
class Beside:
    """One step, and the plan that the candidate made from the view that the step's plan is of."""

    step: HeardStep
    plan: Plan


class Memory:
    """The newest steps of one engine with what the candidate would have done."""

    def __init__(self) -> None:
        self._plans: dict[int, Plan] = {}
        self._steps: deque[Beside] = deque()
        self._rows = 0

    def restart(self) -> None:
        """Forget plans: step ids start over."""
        self._plans = {}

    def decided(self, plan: Plan) -> None:
        """Keep a plan of the candidate's until its step is heard."""
        self._plans[plan.step_id] = plan
        if len(self._plans) > _PLANS:
            del self._plans[next(iter(self._plans))]

    def heard(self, step: HeardStep | None) -> None:
        """Keep a step that followed a plan of ours."""
        if step is None or step.plan is None:
            return
        plan = self._plans.get(step.plan.step_id)
        if plan is None:
            return
        self._steps.append(Beside(step, plan))
        self._rows += len(step.view)
        while self._steps and (len(self._steps) > MOST_STEPS or self._rows > MOST_ROWS):
            self._rows -= len(self._steps.popleft().step.view)

    def steps(self) -> list[Beside]:
        """Return what is kept."""
        return list(self._steps)


def compare(candidate: Candidate, view: BatchView, incumbent: Plan, plan: Plan) -> None:
    """Count the rows for which both plans, fitted to their view, do the same."""
    may = (view.max_k > 0) & (view.prefill_tokens == 0) & (view.proposer_mask > 1)
    theirs, ours = fit_plan(incumbent, view), fit_plan(plan, view)
    same = (theirs.proposer == ours.proposer) & (theirs.k == ours.k)
    candidate.rows += int(may.sum())
    candidate.agreed += int(same[may].sum())
    candidate.their_k += int(theirs.k[may].sum())
    candidate.our_k += int(ours.k[may].sum())


def value_of(kept: list[Beside]) -> Estimate:
    """Estimate the candidate's goodput; raises ValueError where the steps do not support it.

    Doubly robust where the incumbent draws its choices, else by replay.
    """
    logged: list[LoggedStep] = []
    plans: list[Plan] = []
    for beside in kept:
        step = beside.step
        if len(step.view) and step.outcome.step_ms > 0.0:
            try:
                logged += steps_of(heard_rows(step, ""))
            except ValueError:  # an engine's outcome that is not of its view is no part of a log
                continue
            plans.append(beside.plan)
    cost = learned_cost(logged)
    try:
        return _evaluate(logged, plans, "dr", cost)
    except ValueError:
        return _evaluate(logged, plans, "replay", cost)


def _evaluate(logged: list[LoggedStep], plans: list[Plan], by: str, cost: StepMs) -> Estimate:
    return evaluate(lambda _: Recorded(plans), logged, cost, (by,))[by]


class Recorded(Stateless):
    """Plays plans back, one a step, whatever the view."""

    name = "recorded"

    def __init__(self, plans: list[Plan]) -> None:
        self._plans = iter(plans)

    def decide(self, view: BatchView) -> Plan:
        """Return the next plan."""
        return next(self._plans)
