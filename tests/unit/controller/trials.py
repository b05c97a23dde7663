"""A host with an engine, and policies that go wrong, for tests of the lifecycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from parlay.controller.host import Host, Session
from parlay.controller.session import Spec, spec_of
from parlay.policies import policy as registry_module
from parlay.policies.baselines.rows import batch_plan
from parlay.policies.policy import Entry, Stateless
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import BatchView, Plan, PlanSource, Proposer, StepOutcome
from parlay.protos.codec import Hello

DRAFTS = spec_of("fixed", {"proposer": "draft_model", "k": "3"})
DEEP = spec_of("fixed", {"proposer": "draft_model", "k": "8"})


class SlowDrafts(History):
    """A batch for which a pass of the draft model takes `pass_ms`, more than it is worth."""

    pass_ms = 6.0

    def step(self, plan: Plan | None, source: PlanSource = PlanSource.REMOTE) -> StepOutcome:
        outcome = super().step(plan, source)
        more_ms = self.pass_ms * outcome.draft_depth
        draft_ms = outcome.draft_ms.copy()
        draft_ms[Proposer.DRAFT_MODEL] += more_ms
        step_ms = outcome.step_ms + more_ms
        verify_ms = step_ms - 1.0 - float(draft_ms.sum())
        return replace(outcome, step_ms=step_ms, verify_ms=verify_ms, draft_ms=draft_ms)


class Running:
    """One engine of a host, steered step by step."""

    def __init__(self, host: Host, history: History | None = None, engine_id: str = "e") -> None:
        self.host, self.history = host, history or History(8)
        self.stream = host.new_stream()
        self.session: Session = host.hello(Hello(engine_id, LIMITS), self.stream)[0]

    def step(self) -> tuple[BatchView, Plan, StepOutcome]:
        view = self.history.view()
        plan = self.host.decide(self.session, view)
        assert plan is not None
        outcome = self.history.step(plan, PlanSource.REMOTE)
        assert self.host.observe(self.session, outcome)
        return view, plan, outcome

    def run(self, steps: int) -> list[tuple[BatchView, Plan, StepOutcome]]:
        return [self.step() for _ in range(steps)]

    def run_until(self, condition: Callable[[], Any], most: int = 3000) -> None:
        for _ in range(most):
            if condition():
                return
            self.step()
        raise AssertionError("it did not come to that")


class Watched(Stateless):
    """Drafts two tokens, and writes down what it was asked and told."""

    name = "watched"

    def __init__(self, spoil: Callable[[Plan], Any] | None = None) -> None:
        self.views: list[int] = []
        self.outcomes: list[StepOutcome] = []
        self.spoil = spoil

    def decide(self, view: BatchView) -> Plan:
        self.views.append(view.step_id)
        plan = batch_plan(view, Proposer.DRAFT_MODEL, 2)
        made: Plan = plan if self.spoil is None else self.spoil(plan)
        return made

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


@dataclass(slots=True, frozen=True)
class NoSettings:
    """None."""


def registered(
    monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[..., Any]
) -> tuple[Spec, list[Any]]:
    """Register a policy for one test; return its spec, and a list of what is made of it."""
    made: list[Any] = []

    def keep(settings: NoSettings, limits: Any) -> Any:
        made.append(make())
        return made[-1]

    monkeypatch.setitem(registry_module._REGISTRY, name, Entry(name, NoSettings, keep))
    return spec_of(name), made


def raises(plan: Plan) -> Plan:
    if plan.step_id >= 5:
        raise RuntimeError("a bug\nof two lines")
    return plan


def returns_nothing(plan: Plan) -> Any:
    return None


def of_others(plan: Plan) -> Plan:
    return replace(plan, request_id=plan.request_id[::-1])


def of_another_step(plan: Plan) -> Plan:
    return replace(plan, step_id=plan.step_id + 1)


def too_deep(plan: Plan) -> Plan:
    return replace(plan, k=np.full(len(plan), 999, np.int16))


def too_short(plan: Plan) -> Plan:
    return replace(plan, k=plan.k[1:])


WRONG = (raises, returns_nothing, of_others, of_another_step, too_deep, too_short)
