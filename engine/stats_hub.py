"""What an engine keeps for whoever watches it: newest steps, counts, figures of its requests.

The step loop only appends to bounded queues (`arrived`, `stepped`). Everything else runs on the one
thread that serves (`stats.py`), which calls `absorb` many times a second. Free of torch and of the
wire.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING

from parlay.engine.remote_stats import RemoteStats
from parlay.engine.request import Request
from parlay.policies.types import PROPOSERS, BatchView, Plan, PlanSource, StepOutcome, task_id

if TYPE_CHECKING:
    from parlay.engine.step import Engine

BACKLOG_STEPS = 2048
"""Steps that may wait for `absorb`."""
BACKLOG_ARRIVALS = 65536
QUEUE_STEPS = 64
"""Steps that may wait for one subscriber."""
MAX_SUBSCRIBERS = 32
REMEMBERED_REQUESTS = 1024
"""Requests whose figures are kept after their end; the one that ended first makes room."""
SWEEP_S = 1.0
"""How often requests are looked through for those that were aborted."""
_COUNTED = ("emitted", "proposer", "drafted_k", "verified_k", "accepted", "truncated_by")


class TooMany(ValueError):
    """Every place for a subscriber is taken."""


@dataclass(slots=True)
class Counters:
    """Counts since the engine started, as EngineCounters of `stats.proto`."""

    steps: int = 0
    emitted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    plans_remote: int = 0
    plans_local: int = 0
    late_steps: int = 0
    dropped_reports: int = 0
    reconnects: int = 0


@dataclass(slots=True)
class RequestStats:
    """One request's figures; times are of the engine's clock, seconds, nan not known.

    proposers [PROPOSERS][4]: steps, tokens drafted, verified, accepted. timed_tokens: tokens that
    came from first_s to last_s.
    """

    request_id: int
    task: int
    prompt_tokens: int
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: bool = False
    arrived_s: float = nan
    first_s: float = nan
    last_s: float = nan
    timed_tokens: int = 0
    proposers: list[list[int]] = field(default_factory=lambda: [[0] * 4 for _ in range(PROPOSERS)])

    @property
    def ttft_ms(self) -> float | None:
        """Return the time from arrival to the first token; None: either is not known."""
        ms = 1e3 * (self.first_s - self.arrived_s)
        return None if isnan(ms) else ms

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time of a token after the first; None: there are fewer than two."""
        if self.timed_tokens < 2:
            return None
        return 1e3 * (self.last_s - self.first_s) / (self.timed_tokens - 1)


@dataclass(slots=True, eq=False)
class Step:
    """One step that has ended. message: its bytes, once they were needed; b"" before."""

    requests: list[Request]
    view: BatchView
    plan: Plan | None
    source: PlanSource
    outcome: StepOutcome
    end_s: float
    counters: Counters = field(default_factory=Counters)
    message: bytes = b""


class Subscription:
    """One subscriber's queue: where it is full, the oldest step is lost and counted.

    newest_only: it samples, so that older steps are no loss.
    """

    def __init__(self, newest_only: bool) -> None:
        self.lost_steps = 0
        self.newest_only = newest_only
        self._steps: deque[Step] = deque(maxlen=1 if newest_only else QUEUE_STEPS)
        self._news, self._over = asyncio.Event(), False

    def offer(self, step: Step, missed: int = 0) -> None:
        """Queue a step; `missed` steps before it never came here."""
        if not self.newest_only:
            self.lost_steps += missed + (len(self._steps) == self._steps.maxlen)
        self._steps.append(step)
        self._news.set()

    def end(self) -> None:
        """Let `next` return None once the queue is empty."""
        self._over = True
        self._news.set()

    async def next(self) -> Step | None:
        """Return the oldest step there is, waiting for one; None: no more will come."""
        while not self._steps:
            if self._over:
                return None
            self._news.clear()
            await self._news.wait()
        return self._steps.popleft()


class StatsHub:
    """Takes what an engine's step loop tells, once attached, and keeps it for subscribers.

    remote: what the planner that asks a sidecar counts, None where there is none.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.remote: RemoteStats | None = None
        self.counters = Counters()
        self._arrivals: deque[tuple[Request, float]] = deque(maxlen=BACKLOG_ARRIVALS)
        self._steps: deque[Step] = deque(maxlen=BACKLOG_STEPS)
        self._live: dict[int, tuple[Request, RequestStats]] = {}
        self._ended: OrderedDict[int, RequestStats] = OrderedDict()
        self._subscriptions: list[Subscription] = []
        self._newest: Step | None = None
        self._swept_s = 0.0

    def attach(self, engine: Engine) -> None:
        """Let an engine tell what it does from now on; before its steps begin, not during one."""
        stats = getattr(engine.planner, "stats", None)
        self.remote = stats if isinstance(stats, RemoteStats) else None
        engine.stats = self

    def arrived(self, request: Request, now_s: float) -> None:
        """Note a request that was queued; for the step loop."""
        self._arrivals.append((request, now_s))

    def stepped(
        self,
        requests: list[Request],
        view: BatchView,
        plan: Plan | None,
        source: PlanSource,
        outcome: StepOutcome,
        end_s: float,
    ) -> None:
        """Note a step; for the step loop, which writes to none of these again."""
        self._steps.append(Step(requests, view, plan, source, outcome, end_s))

    def absorb(self) -> None:
        """Count what came since the last call and pass it on to the subscribers."""
        steps = len(self._steps)  # first: of these, every request's arrival is there
        for _ in range(len(self._arrivals)):
            request, now_s = self._arrivals.popleft()
            self._stats(request).arrived_s = now_s
        for _ in range(steps):
            step = self._steps.popleft()
            missed = self._missed(step)
            self._count(step, missed)
            step.requests, self._newest = [], step
            for subscription in self._subscriptions:
                subscription.offer(step, missed)
        if (now_s := time.monotonic()) - self._swept_s > SWEEP_S:
            self._swept_s = now_s
            for request, _ in [entry for entry in self._live.values() if entry[0].finished]:
                self._end(request)

    @contextmanager
    def subscribe(self, newest_only: bool = False) -> Iterator[Subscription]:
        """Yield a queue that begins with the newest step, if any; raises TooMany."""
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            raise TooMany(f"{MAX_SUBSCRIBERS} callers watch, which is the most at a time")
        subscription = Subscription(newest_only)
        self.absorb()
        if self._newest is not None:
            subscription.offer(self._newest)
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)

    @property
    def subscribers(self) -> int:
        """Return how many watch now."""
        return len(self._subscriptions)

    def end(self) -> None:
        """Tell every subscriber that no more will come."""
        for subscription in self._subscriptions:
            subscription.end()

    def request(self, request_id: int) -> RequestStats | None:
        """Return a request's figures; None where it is neither running nor remembered."""
        self.absorb()
        if entry := self._live.get(request_id):
            if not entry[0].finished:
                self._refresh(*entry)
                return entry[1]
            self._end(entry[0])
        return self._ended.get(request_id)

    def _missed(self, step: Step) -> int:
        """Return how many steps the backlog has lost before this one."""
        before = step.outcome.step_id - 1 if self._newest is None else self._newest.outcome.step_id
        return max(0, step.outcome.step_id - before - 1)

    def _count(self, step: Step, missed: int) -> None:
        outcome, counters = step.outcome, self.counters
        columns = [getattr(outcome, name).tolist() for name in _COUNTED]
        for request, row in zip(step.requests, zip(*columns, strict=True), strict=True):
            self._count_row(request, step.end_s, row)
        counters.steps += 1 + missed
        counters.emitted_tokens += sum(columns[0])
        counters.drafted_tokens += sum(columns[2])
        counters.accepted_tokens += sum(columns[4])
        counters.plans_remote += step.source is PlanSource.REMOTE
        counters.plans_local += step.source is PlanSource.LOCAL
        if self.remote is not None:
            for name in ("late_steps", "dropped_reports", "reconnects"):
                setattr(counters, name, getattr(self.remote, name))
        step.counters = dataclasses.replace(counters)

    def _count_row(self, request: Request, end_s: float, row: tuple[int, ...]) -> None:
        emitted, proposer, drafted, verified, accepted, truncated = row
        stats = self._stats(request)
        self._refresh(request, stats)
        if emitted:
            stats.first_s = end_s if isnan(stats.first_s) else stats.first_s
            stats.last_s = end_s
            stats.timed_tokens += emitted
        if drafted:
            before = stats.proposers[proposer]
            counts = zip(before, (1, drafted, verified, accepted), strict=True)
            stats.proposers[proposer] = [a + b for a, b in counts]
        if truncated:
            self._end(request)

    def _refresh(self, request: Request, stats: RequestStats) -> None:
        """Take over what the request itself counts."""
        stats.output_tokens, stats.steps = request.output_tokens, request.steps
        stats.finished = request.finished
        self.counters.preemptions += request.preemptions - stats.preemptions
        stats.preemptions = request.preemptions

    def _stats(self, request: Request) -> RequestStats:
        """Return a request's figures, new ones where there are none."""
        request_id = request.request_id
        if entry := self._live.get(request_id):
            return entry[1]
        if ended := self._ended.get(request_id):
            return ended
        task = task_id(request.speculation.learned_with)
        stats = RequestStats(request_id, task, request.prompt_tokens)
        self._live[request_id] = request, stats
        return stats

    def _end(self, request: Request) -> None:
        """Move a request to those remembered; its tokens are let go."""
        if (entry := self._live.pop(request.request_id, None)) is None:
            return
        self._refresh(*entry)
        self.counters.finished_requests += 1
        self._ended[request.request_id] = entry[1]
        if len(self._ended) > REMEMBERED_REQUESTS:
            self._ended.popitem(last=False)
