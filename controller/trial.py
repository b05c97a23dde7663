"""One candidate beside one engine's policy: its own policy object, and which steps it decided.

Whatever the candidate does wrong comes out as `CandidateFailed`; nothing of it reaches the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import TypeVar

import numpy as np

from parlay.controller.blocks import Blocks
from parlay.controller.canary import Arms, mixed, on_canary
from parlay.controller.candidate import Candidate, Stage
from parlay.controller.heard import HeardStep
from parlay.controller.session import Session
from parlay.controller.shadow import Memory, compare
from parlay.policies.policy import Policy
from parlay.policies.types import Array, BatchView, Plan, PlanSource, StepOutcome
from parlay.protos import codec

_STEPS = 64
Result = TypeVar("Result")
_DEFAULT, _REMOTE = int(PlanSource.DEFAULT), int(PlanSource.REMOTE)


class CandidateFailed(Exception):
    """A candidate raised, or returned a plan that no engine could follow."""


class Arm(IntEnum):
    """Who decided a step: the incumbent, the candidate, or either by request."""

    INCUMBENT = 0
    CANDIDATE = 1
    BY_REQUEST = 2


def _steps() -> Array:
    return np.full((_STEPS, 2), -1, np.int64)


@dataclass(slots=True)
class Trial:
    """A candidate at work on one engine; `arms` holds (step_id, Arm) by step_id modulo _STEPS."""

    candidate: Candidate
    policy: Policy
    engine_id: str
    blocks: Blocks = field(init=False)
    requests: Arms = field(default_factory=Arms)
    memory: Memory = field(default_factory=Memory)
    arms: Array = field(default_factory=_steps)

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.engine_id)

    def anew(self) -> None:
        """Measure from the start, against another incumbent."""
        self.blocks, self.requests, self.memory = Blocks(self.engine_id), Arms(), Memory()
        self.arms[:] = -1

    def restart(self) -> None:
        """Begin a new run of step ids."""
        self.blocks.restart()
        self.memory.restart()
        self.arms[:] = -1

    def lead(self, session: Session, view: BatchView) -> tuple[Plan, str]:
        """Return the plan of a step that the candidate may decide, as a whole or by request.

        Where the candidate fails it is the incumbent's, with why; the incumbent decides once.
        """
        candidate = self.candidate
        block = self.blocks.next(view) if candidate.switch_back else None
        arm = Arm.BY_REQUEST if candidate.share > 0.0 else Arm.INCUMBENT
        if block is not None:
            arm = Arm.CANDIDATE if block else Arm.INCUMBENT
        self.arms[view.step_id % _STEPS] = (view.step_id, arm)
        ours, why = None, ""
        if arm is not Arm.INCUMBENT:
            try:
                ours = self.decide(view)
            except CandidateFailed as error:
                why = str(error)
        if ours is not None and arm is Arm.CANDIDATE:
            session.plans_before += 1
            return replace(ours, propensity=_halved(ours)), ""
        plan = session.policy.decide(view)
        if ours is not None:
            try:
                return _try(partial(self._by_request, plan, ours, view)), ""
            except CandidateFailed as error:
                why = str(error)
        return (plan if block is None else replace(plan, propensity=_halved(plan))), why

    def decide(self, view: BatchView) -> Plan:
        """Return the candidate's plan, checked; raises CandidateFailed."""
        plan = _try(partial(self._checked, view))
        self.candidate.decisions += 1
        self.candidate.state_version = plan.state_version
        return plan

    def beside(self, view: BatchView, plan: Plan) -> None:
        """Let the candidate decide without being applied; raises CandidateFailed."""
        ours = self.decide(view)
        _try(partial(compare, self.candidate, view, plan, ours))
        self.memory.decided(ours)

    def arm_of(self, outcome: StepOutcome) -> Arm:
        """Return who decided the plan that a step followed; the incumbent where it was none."""
        followed = outcome.plan_source == _REMOTE
        if not followed.any():
            return Arm.INCUMBENT
        plan = int(outcome.plan_step_id[followed.argmax()])
        step, arm = self.arms[plan % _STEPS].tolist()
        return Arm(arm) if step == plan else Arm.INCUMBENT

    def theirs(self, outcome: StepOutcome) -> Array:
        """Return bool [rows]: did this row follow the candidate."""
        arm, followed = self.arm_of(outcome), outcome.plan_source == _REMOTE
        if arm is Arm.INCUMBENT:
            return np.zeros(len(outcome), bool)
        if arm is Arm.CANDIDATE:
            whole: Array = followed
            return whole
        by_hash = on_canary(self.engine_id, outcome.request_id, self.candidate.share)
        ours: Array = followed & by_hash
        return ours

    def observe(self, outcome: StepOutcome, theirs: Array, step: HeardStep | None) -> str:
        """Let the candidate learn, and measure it; return why its trial must end, or nothing.

        Raises CandidateFailed.
        """
        return _try(partial(self._learn, outcome, theirs, step))

    def _checked(self, view: BatchView) -> Plan:
        plan = self.policy.decide(view)
        check_plan(plan, view)
        return plan

    def _by_request(self, plan: Plan, ours: Plan, view: BatchView) -> Plan:
        """Return both plans as one; the incumbent's where it is not of the view's rows."""
        if not np.array_equal(plan.request_id, view.request_id):
            return plan
        share = self.candidate.share
        theirs = on_canary(self.engine_id, view.request_id, share)
        names = (plan.policy_version or "?", ours.policy_version or self.candidate.spec.name)
        both = mixed(plan, ours, view, theirs, share)
        both.policy_version = f"{names[0]} + {share:g} {names[1]}"
        compare(self.candidate, view, plan, ours)
        return both

    def _learn(self, outcome: StepOutcome, theirs: Array, step: HeardStep | None) -> str:
        self.policy.observe(only_following(outcome, theirs))
        candidate = self.candidate
        if candidate.stage is Stage.SHADOW:
            self.memory.heard(step)
            return ""
        remote = only_following(outcome, outcome.plan_source == _REMOTE)
        pair = self.blocks.observe(remote) if candidate.switch_back else None
        if pair is not None and (why := candidate.compared(pair)):
            return why
        counts = self.arm_of(outcome) is Arm.BY_REQUEST
        found = self.requests.observe(outcome, theirs, counts) if candidate.share > 0.0 else []
        return next((why for why in map(candidate.ended, found) if why), "")


def only_following(outcome: StepOutcome, rows: Array) -> StepOutcome:
    """Return the outcome in which only `rows` bool [rows] followed a plan: what others did stays.

    So no policy takes itself for the cause of another's steps, and each learns from all of them.
    """
    if rows.all():
        return outcome
    source = np.where(rows, outcome.plan_source, _DEFAULT).astype(outcome.plan_source.dtype)
    return replace(outcome, plan_source=source)


def check_plan(plan: Plan, view: BatchView) -> None:
    """Raise ValueError where an engine would refuse the plan, or it is not of this view."""
    codec.decode_decision(codec.encode_decision(plan))
    if plan.step_id != view.step_id:
        raise ValueError(f"the plan is of step {plan.step_id}, not {view.step_id}")
    if not np.array_equal(plan.request_id, view.request_id):
        raise ValueError("the plan is not of the view's requests")


def _halved(plan: Plan) -> Array:
    """Return the propensity of a plan that stands in for another's half of the time."""
    half: Array = np.float32(0.5) * plan.propensity
    return half


def _try(work: Callable[[], Result]) -> Result:
    """Return what `work` returns; whatever it raises becomes a CandidateFailed of one line."""
    try:
        return work()
    except Exception as error:
        text = " ".join(str(error).split())
        raise CandidateFailed(f"{type(error).__name__}: {text}") from error
