"""The thread that owns the engine: takes orders between steps, hands tokens to the event loop.

Only this thread touches the engine. A request that is given up is aborted before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from parlay.engine.request import Request, SamplingParams, SpeculationParams, TokenLogprob
from parlay.engine.server.errors import ApiError
from parlay.engine.server.meter import Meter
from parlay.engine.step import Engine

log = logging.getLogger("parlay.server")


@dataclass(slots=True, frozen=True)
class Batch:
    """What one step, or several, gave a request; request.finish_reason says whether it is over."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    last: bool


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the engine; `batches` is read on the event loop.

    request is set once the engine has it. over: nothing more will come.
    """

    prompt: list[int]
    sampling: SamplingParams
    speculation: SpeculationParams
    batches: asyncio.Queue[Batch | ApiError] = field(default_factory=asyncio.Queue)
    request: Request | None = None
    over: bool = False


class Worker:
    """Steps the engine in a thread of its own while there is work.

    max_waiting: requests that may wait beyond those that run. on_crash is called on the event loop
    where a step fails for a reason that no request is to blame for.
    """

    def __init__(self, engine: Engine, meter: Meter, max_waiting: int) -> None:
        self.engine, self.meter = engine, meter
        self.on_crash: Callable[[], None] = _nobody
        self.limit = engine.config.max_running + max_waiting
        self.in_flight, self.crashed = 0, False
        self._orders: queue.SimpleQueue[tuple[bool, Job] | None] = queue.SimpleQueue()
        self._jobs: set[Job] = set()
        self._news: list[tuple[Job, Batch | ApiError]] = []
        self._thread = threading.Thread(target=self._run, name="parlay-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin; call it on the event loop that submits."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread, and with it every request that still runs."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    def submit(self, job: Job) -> None:
        """Queue a request; raises ApiError where too many wait. `release` must follow."""
        if self.crashed:
            raise ApiError(503, "the engine has failed; the server is about to end")
        if self.in_flight >= self.limit:
            raise ApiError(
                429, f"{self.in_flight} requests run or wait: try again later", code="overloaded"
            )
        self.in_flight += 1
        self._orders.put((True, job))

    def release(self, job: Job) -> None:
        """Let go of a request; one that is not over is aborted before the next step."""
        self.in_flight -= 1
        if not job.over:
            self._orders.put((False, job))

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except Exception:
            log.exception("the engine failed")
            self._refuse_all()

    def _refuse_all(self) -> None:
        """Fail every request, also those that still come, until the end."""
        self.crashed = True
        failed = ApiError(500, "the engine failed")
        self._news.extend((job, failed) for job in self._jobs)
        self._hand_over()
        self._post(self.on_crash)
        while (order := self._orders.get()) is not None:
            if order[0]:
                self._news.append((order[1], failed))
                self._hand_over()

    def _obey(self) -> bool:
        """Take every order that is there, waiting for one while idle; False: end."""
        with contextlib.suppress(queue.Empty):
            while (order := self._orders.get(block=not self.engine.has_work)) is not None:
                wanted, job = order
                if wanted:
                    self._add(job)
                elif job in self._jobs:
                    assert job.request is not None
                    self.engine.abort(job.request)
                    self._settle(job)
            return False
        return True

    def _add(self, job: Job) -> None:
        def on_tokens(request: Request, tokens: list[int]) -> None:
            logprobs = request.logprobs[-len(tokens) :] if request.logprobs else []
            self._news.append((job, Batch(tokens, logprobs, request.finished)))
            if request.finished:
                self._settle(job)

        try:
            job.request = self.engine.add(job.prompt, job.sampling, job.speculation, on_tokens)
        except ValueError as error:
            self._news.append((job, ApiError(400, str(error))))
            self._hand_over()
        else:
            self._jobs.add(job)
            self.meter.added(job.request)

    def _step(self) -> None:
        outcome = self.engine.step()
        if outcome is not None:
            self.meter.stepped(outcome)
        for job in [j for j in self._jobs if j.request is not None and j.request.finished]:
            # It ended without a token: nobody may wait for one.
            self._news.append((job, ApiError(500, "the engine gave this request up")))
            self._settle(job)
        self._hand_over()

    def _settle(self, job: Job) -> None:
        assert job.request is not None
        self._jobs.discard(job)
        self.meter.finished(job.request)

    def _hand_over(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._post(lambda: _deliver(news))

    def _post(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(call)


def _nobody() -> None:
    pass


def _deliver(news: list[tuple[Job, Batch | ApiError]]) -> None:
    for job, batch in news:
        job.over |= isinstance(batch, ApiError) or batch.last
        job.batches.put_nowait(batch)
