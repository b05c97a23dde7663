"""Many engines on one sidecar: round trips, losses, its memory and CPU time.

The engines are streams of this process, and what they report was made beforehand: on a small
machine they would else take the time that is to be measured. Each has a step every 10 ms, give or
take a tenth, so that by and by their steps fall together in every way they can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import grpc
import numpy as np

from parlay.engine.bench_cpu import CpuUse
from parlay.engine.bench_memory import resident_mb
from parlay.engine.remote import OPTIONS
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome
from parlay.protos import codec

REQUESTS = 64
PERIOD_S = 0.010
JITTER = 0.1
WARM_UP_S = 2.0
SAMPLE_S = 0.5
_PATIENCE_S = 5.0
"""A report without an answer for so long is lost, and its stream with it."""
_RECORDED = 400
_MOST_IDS = 1 << 20
_PARTS = 6
"""Memory at the start and at the end is the median of the first and last of so many parts."""


@dataclass(slots=True)
class Engine:
    """What one engine saw: steps, those without a plan, microseconds from each report to its plan.

    record: steps that are played again and again, a view with the outcome of the step before.
    """

    number: int
    record: list[tuple[StepOutcome, BatchView]]
    steps: int = 0
    lost: int = 0
    round_trip_us: list[float] = field(default_factory=list)


def measure_fleet(
    target: str, pid: int, engines: int, seconds: float
) -> dict[str, float | list[float]]:
    """Return the figures of `engines` on the sidecar at `target`, whose process is `pid`.

    Times in microseconds, memory in MB (10^6 bytes, nan where the system does not tell). Raises
    OSError where the sidecar does not answer.
    """
    fleet = [Engine(number, _recorded(number)) for number in range(engines)]
    memory_mb, use = list[float](), CpuUse(pid)
    try:
        asyncio.run(_run(target, fleet, seconds, memory_mb, use))
    except (grpc.RpcError, TimeoutError, ValueError) as error:
        said = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        raise OSError(f"the sidecar does not answer: {said or 'it is silent'}") from None
    return _figures(fleet, memory_mb, use)


def percentiles(prefix: str, samples_us: Iterable[float]) -> dict[str, float]:
    """Return the median and the 99th percentile under PREFIX's names."""
    p50, p99 = np.percentile(list(samples_us), [50, 99])
    return {f"{prefix}p50_us": float(p50), f"{prefix}p99_us": float(p99)}


def _recorded(number: int) -> list[tuple[StepOutcome, BatchView]]:
    history, policy = History(REQUESTS, seed=number), make_policy("goodput", None, LIMITS)
    found = []
    for _ in range(_RECORDED):
        plan = policy.decide(history.view())
        outcome = history.step(plan, PlanSource.LOCAL)
        policy.observe(outcome)
        found.append((outcome, history.view()))
    return found


def _replayed(engine: Engine, step: int) -> codec.StepReport:
    """Return the report before step `step`: its requests are others each time round."""
    turn, place = divmod(step - 1, _RECORDED)
    outcome, view = engine.record[place]
    by = np.uint64(turn * _MOST_IDS)
    shadow = dataclasses.replace(outcome.shadow, request_id=outcome.shadow.request_id + by)
    outcome = dataclasses.replace(
        outcome, step_id=step - 1, request_id=outcome.request_id + by, shadow=shadow
    )
    view = dataclasses.replace(view, step_id=step, request_id=view.request_id + by)
    return codec.StepReport(outcome, view)


async def _run(
    target: str, fleet: Sequence[Engine], seconds: float, memory_mb: list[float], use: CpuUse
) -> None:
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        watch = asyncio.create_task(_watch(memory_mb, use))
        try:
            await asyncio.gather(*(_steer(channel, engine, seconds) for engine in fleet))
        finally:
            watch.cancel()


async def _watch(memory_mb: list[float], use: CpuUse) -> None:
    """Note the memory and the CPU time of a process again and again, once all are warm."""
    await asyncio.sleep(WARM_UP_S)
    while (now_mb := resident_mb(use.pid)) is not None:
        memory_mb.append(now_mb)
        use.note()
        await asyncio.sleep(SAMPLE_S)


async def _steer(channel: grpc.aio.Channel, engine: Engine, seconds: float) -> None:
    """Be one engine: report, wait for the plan, sleep until the next step is due."""
    open_stream: Any = channel.stream_stream(codec.STEER)
    stream = open_stream(wait_for_ready=True)
    async with asyncio.timeout(_PATIENCE_S):
        await stream.write(codec.encode_request(codec.Hello(f"bench-{engine.number}", LIMITS, 1)))
        await stream.read()
    jitter = np.random.default_rng(engine.number)
    step, due_s = 0, time.perf_counter()
    warm_s = due_s + WARM_UP_S
    while due_s < warm_s + seconds:
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        step += 1
        data = codec.encode_request(_replayed(engine, step))
        began_s = time.perf_counter()
        async with asyncio.timeout(_PATIENCE_S):
            await stream.write(data)
            answer = await stream.read()
        ended_s = time.perf_counter()
        plan = codec.decode_response(answer) if isinstance(answer, bytes) else None
        if due_s >= warm_s:
            engine.steps += 1
            engine.lost += not (isinstance(plan, Plan) and plan.step_id == step)
            engine.round_trip_us.append(1e6 * (ended_s - began_s))
        due_s += PERIOD_S * float(jitter.uniform(1.0 - JITTER, 1.0 + JITTER))
    await stream.done_writing()


def _figures(
    fleet: Sequence[Engine], memory_mb: Sequence[float], use: CpuUse
) -> dict[str, float | list[float]]:
    part = max(len(memory_mb) // _PARTS, 1)
    known = memory_mb or [np.nan]
    tenths = zip(*(np.array_split(engine.round_trip_us, 10) for engine in fleet), strict=True)
    return {
        **percentiles("engines_", [us for engine in fleet for us in engine.round_trip_us]),
        "engines_p99_tenths_us": [float(np.percentile(np.concatenate(t), 99)) for t in tenths],
        "engines_steps": sum(engine.steps for engine in fleet),
        "engines_lost": sum(engine.lost for engine in fleet),
        "engines_memory_start_mb": float(median(known[:part])),
        "engines_memory_end_mb": float(median(known[-part:])),
        "engines_sidecar_cores": use.cores,
        "engines_stolen_share": use.stolen_share,
    }
