"""What a sidecar hears of a step, put together: its view, the plan it followed, and its outcome.

A step's outcome comes with the view of the step after, and the plan that it followed was computed
from an earlier view than its own; both wait here. Steps that the engine does not report (`quiet`),
or whose view it left out, are no part of the log.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.log_schema import Columns, rows_of
from parlay.policies.types import Array, BatchView, Fitted, Plan, PlanSource, StepOutcome

MOST_WAITING = 64
"""Views, and plans, kept of an engine that reports no outcomes."""


@dataclass(slots=True, frozen=True)
class HeardStep:
    """One step of `engine`; plan None: it followed none of ours. Its arrays are written no more."""

    engine: str
    view: BatchView
    plan: Plan | None
    outcome: StepOutcome


class Waiting:
    """Views and plans of one run of step ids, until the outcomes are heard that they belong to."""

    def __init__(self) -> None:
        self.views: dict[int, BatchView] = {}
        self.plans: dict[int, Plan] = {}

    def decided(self, view: BatchView, plan: Plan) -> None:
        """Keep a view and the plan made from it."""
        self.views[view.step_id], self.plans[plan.step_id] = view, plan
        for kept in (self.views, self.plans):
            if len(kept) > MOST_WAITING:
                del kept[next(iter(kept))]

    def step_of(self, engine: str, outcome: StepOutcome) -> HeardStep | None:
        """Return the step that an outcome ends; None where its view was not heard.

        Outcomes come in the order of their steps: what only earlier ones could need is let go.
        """
        now = outcome.step_id
        view = self.views.get(now)
        plan = self.plans.get(int(outcome.plan_step_id[0])) if len(outcome) else None
        self.views = {step: kept for step, kept in self.views.items() if step > now}
        self.plans = {
            step: kept for step, kept in self.plans.items() if step + kept.expires_after_steps > now
        }
        return None if view is None else HeardStep(engine, view, plan, outcome)


def heard_rows(step: HeardStep, policy: str) -> Columns:
    """Return a step's rows of the decision log; `policy` names plans that carry no version.

    Where the plan does not explain what the engine reports (a plan of its own, or one of another
    sidecar), the decision is what was reported, with a propensity of nan: unknown. Raises
    ValueError where view and outcome are not of the same requests.
    """
    plan, outcome = step.plan, step.outcome
    if plan is not None:
        fit = _fitted(plan, step.view, outcome)
        known = _explains(fit, outcome)
        if known.any():
            plan = dataclasses.replace(plan, policy_version=plan.policy_version or policy)
            return rows_of(step.view, _reported(fit, outcome, ~known), plan, outcome, step.engine)
    fit = _reported(fit_plan(None, step.view), outcome, np.ones(len(step.view), bool))
    return rows_of(step.view, fit, None, outcome, step.engine)


def _fitted(plan: Plan, view: BatchView, outcome: StepOutcome) -> Fitted:
    """Fit the plan as the engine did: before drafting, and again with what was drafted."""
    if len(view) != len(outcome) or not outcome.drafted_k.any():
        return fit_plan(plan, view)
    return fit_plan(plan, view, outcome.drafted_k.astype(np.int32), outcome.confidences)


def _explains(fit: Fitted, outcome: StepOutcome) -> Array:
    """Return bool [rows]: can the row have followed this fit; blocks that are short lower its k."""
    if len(fit.k) != len(outcome):
        return np.zeros(len(fit.k), bool)
    ours = fit.follows == (outcome.plan_source == PlanSource.REMOTE)
    ours &= outcome.plan_source != PlanSource.LOCAL
    same = (outcome.drafted_k == 0) | (outcome.proposer == fit.proposer)
    found: Array = ours & same & (outcome.requested_k <= fit.k)
    return found


def _reported(fit: Fitted, outcome: StepOutcome, rows: Array) -> Fitted:
    """Return the fit with the engine's own words where `rows` bool [rows] holds."""
    if len(rows) != len(outcome):
        return fit
    none = np.zeros_like(rows)
    return Fitted(
        proposer=np.where(rows, outcome.proposer, fit.proposer).astype(np.uint8),
        k=np.where(rows, outcome.requested_k, fit.k).astype(np.int32),
        verify_k=np.where(rows, outcome.verified_k, fit.verify_k).astype(np.int32),
        follows=np.where(rows, none, fit.follows),
        shadow=np.where(rows, none, fit.shadow),
        propensity=np.where(rows, np.float32(np.nan), fit.propensity).astype(np.float32),
        reason=np.where(rows, 0, fit.reason).astype(np.uint8),
    )
