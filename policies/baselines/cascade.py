"""Draft where it pays: each request tries a few k for short, then keeps the best one for long.

Source: Cascade (Saxena et al. 2025, "Utility-Driven Speculative Decoding for Mixture-of-Experts",
2506.20675): utility = tokens a step with drafts over without, divided by step time with over
without. Short tests try k after k while utility rises; a long set keeps the best, or none where
utility is below 1. How long both are is set here (4 and 32 steps).

The source serves one request. In a batch no request has a step time of its own: the time is that of
a step in which every row drafts as this one does, by step times learned while running (`cost.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.recent import Recent
from parlay.policies.baselines.rows import check_k, drafter, rows_plan
from parlay.policies.cost import StepTime
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import (
    DRAFT_MODEL,
    Array,
    BatchView,
    Plan,
    PlanSource,
    Reason,
    StepOutcome,
)

_SET = -1
_NOT_BEGUN = -1


@dataclass(slots=True, frozen=True)
class CascadeSettings:
    """proposer; k, those tried, rising; test_steps, of each trial; set_steps, until the next."""

    proposer: str = "draft_model"
    k: tuple[int, ...] = (1, 3, 5)
    test_steps: int = 4
    set_steps: int = 32

    def __post_init__(self) -> None:
        drafter("cascade", self.proposer)
        for k in self.k:
            check_k("cascade", "k", k, least=1)
        if not self.k or list(self.k) != sorted(set(self.k)):
            raise ValueError(f"cascade: k must be one or more numbers that rise, not {self.k}")
        if self.test_steps < 1 or self.set_steps < 1:
            raise ValueError("cascade: test_steps and set_steps must be 1 or more")


@dataclass(slots=True)
class Course:
    """Where a request stands.

    trial: place in the ladder, or _SET; k: what the set keeps; since: first plan of this phase, or
    _NOT_BEGUN; steps and tokens of the phase; best utility of this test and its best_k.
    """

    trial: int = 0
    k: int = 0
    since: int = _NOT_BEGUN
    steps: int = 0
    tokens: float = 0.0
    best: float = 0.0
    best_k: int = 0

    def begin(self, trial: int) -> None:
        """Go on to a trial, or to the set."""
        self.trial, self.since, self.steps, self.tokens = trial, _NOT_BEGUN, 0, 0.0


@register("cascade", CascadeSettings)
class Cascade(Stateless):
    """Keeps each request's course, and what steps take."""

    name = "cascade"

    def __init__(self, settings: CascadeSettings, limits: EngineLimits) -> None:
        self.settings = settings
        self.proposer = drafter("cascade", settings.proposer)
        self.ladder = sorted({max(1, min(k, limits.k_max)) for k in settings.k})
        self.course: Recent[Course] = Recent(Course)
        self.step_time = StepTime()

    def decide(self, view: BatchView) -> Plan:
        """Return each request's k under trial, or the one its set keeps."""
        courses = self.course.of(view)
        for course in courses:
            if course.since == _NOT_BEGUN:
                course.since = view.step_id
        k = np.array([c.k if c.trial == _SET else self.ladder[c.trial] for c in courses], int)
        plan = rows_plan(view, self.proposer, k, default=(self.proposer, self.ladder[0]))
        test = np.array([c.trial != _SET for c in courses], bool)
        plan.reason[:] = np.where(
            test, Reason.EXPLORE, np.where(k, Reason.HEURISTIC, Reason.NO_GAIN)
        )
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Count the step towards every request's phase."""
        self.step_time.observe(outcome, 0.0)
        followed = (outcome.plan_source != PlanSource.DEFAULT) & (outcome.emitted > 0)
        cost = self.cost(len(outcome), float(outcome.kv_tokens)) if followed.any() else []
        ids, plans = outcome.request_id.tolist(), outcome.plan_step_id.tolist()
        for row in np.flatnonzero(followed).tolist():
            course = self.course.get(ids[row])
            if course is None or course.since == _NOT_BEGUN or plans[row] < course.since:
                continue
            # A trial in which nothing could be drafted shows nothing of its k.
            if course.trial == _SET or outcome.verified_k[row] > 0:
                course.steps += 1
                course.tokens += float(outcome.accepted[row]) + 1.0
                self._move(course, cost)

    def _move(self, course: Course, cost: list[float]) -> None:
        if course.trial == _SET:
            if course.steps == self.settings.set_steps:
                course.best, course.best_k = 0.0, 0
                course.begin(0)
        elif course.steps == self.settings.test_steps:
            utility = course.tokens / course.steps / cost[course.trial]
            better = utility >= 1.0 and utility > course.best
            if better:
                course.best, course.best_k = utility, self.ladder[course.trial]
            if better and course.trial + 1 < len(self.ladder):
                course.begin(course.trial + 1)
            else:
                course.k = course.best_k
                course.begin(_SET)

    def cost(self, rows: int, kv_tokens: float) -> list[float]:
        """Return, for each k of the ladder, a step's time over that of one without drafts."""
        k = np.array([0, *self.ladder], float)
        a_pass, token_ms, _ = self.step_time.draft_ms()
        ms = self.step_time.verify_ms(rows * (1.0 + k), kv_tokens)
        ms = ms + k * rows * token_ms[self.proposer]
        ms = ms + (k * a_pass if self.proposer == DRAFT_MODEL else 0.0)
        ratio: list[float] = (ms[1:] / ms[0]).tolist()
        return ratio

    def state(self) -> dict[str, Array]:
        """Return every course, and the step times."""
        courses = self.course.items()
        rows = np.array([dataclasses.astuple(course) for _, course in courses], float)
        cost = {f"cost.{key}": value for key, value in self.step_time.state().items()}
        return {
            "request_id": np.array([r for r, _ in courses], np.uint64),
            "course": rows.reshape(len(courses), len(dataclasses.fields(Course))),
            **cost,
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        width = len(dataclasses.fields(Course))
        if set(state) != set(self.state()) or np.shape(state["course"])[1:] != (width,):
            raise ValueError("cascade: the state is incomplete or of another policy")
        trials = np.asarray(state["course"])[:, 0]
        if ((trials < _SET) | (trials >= len(self.ladder))).any():
            raise ValueError("cascade: the state is of a policy that tries other k")
        cost = {k.removeprefix("cost."): v for k, v in state.items() if k.startswith("cost.")}
        self.step_time.load(cost)
        kinds = [int, int, int, int, float, float, int]
        rows = [
            Course(*(kind(v) for kind, v in zip(kinds, row, strict=True)))
            for row in np.asarray(state["course"]).tolist()
        ]
        self.course.load(state["request_id"].tolist(), rows)
