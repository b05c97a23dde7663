"""A host that an observatory watches, made-up engines, and who asks, for tests of what is seen."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import numpy as np

from parlay.controller.host import Host, Session
from parlay.policies.policy import EngineLimits
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome, task_id
from parlay.protos.codec import Hello

_RUNS = count(1)
TAGS = ("chat", "code", "edit", "summarise")


class Clock:
    """Unix seconds that move only when told."""

    def __init__(self, now_s: float = 1e9) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class TaggedHistory(History):
    """A made-up batch whose tasks have names, with room in its cache."""

    def _look(self) -> BatchView:
        view = super()._look()
        view.task = np.array([task_id(TAGS[t % len(TAGS)]) for t in view.task], np.uint32)
        view.free_blocks = view.total_blocks // 2
        return view


def run_steps(
    host: Host,
    engine: str,
    steps: int,
    rows: int = 8,
    clock: Clock | None = None,
    step_s: float = 0.02,
    limits: EngineLimits = LIMITS,
) -> tuple[Session, list[tuple[BatchView, Plan, StepOutcome]]]:
    """Run an engine for some steps; return its session, and views, plans and outcomes."""
    session, _ = host.hello(Hello(engine, limits, run_id=next(_RUNS)), host.new_stream())
    history, seen = TaggedHistory(rows, limits=limits), []
    for _ in range(steps):
        view = history.view()
        plan = host.decide(session, view)
        assert plan is not None
        outcome = history.step(plan, PlanSource.REMOTE)
        host.observe(session, outcome)
        seen.append((view, plan, outcome))
        if clock is not None:
            clock.now_s += step_s
    return session, seen


def ask(app: Any, path: str, *shown: str, query: str = "") -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of a GET of an ASGI application; shown: Authorizations."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
        "headers": [(b"authorization", one.encode("latin-1")) for one in shown],
        "query_string": query.encode(), "root_path": "", "scheme": "http", "http_version": "1.1",
        "server": ("testserver", 80), "client": ("203.0.113.9", 1),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:]).decode()
