"""`parlay bench rpc`: what asking the sidecar costs, with a sidecar in a process of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner, RemoteStats
from parlay.engine.sidecar import START_S, sidecar
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History

_MEANING = {
    "p50_us": "from a report to its plan, step after step",
    "paced_p50_us": "the same with a step each 10 ms",
    "engine_thread_p50_us": "what a step costs the engine's own thread, which never waits",
    "fresh_share": "steps that followed a plan of the newest report or the one before",
}
WARM_UP_STEPS = 50
PACE_S = 0.010
BUSY_S = 0.002
"""How much of a paced step holds the interpreter, as an engine's own Python does."""


def bench_rpc(
    requests: Annotated[int, typer.Option(min=1, max=4096, help="rows of the batch")] = 256,
    policy: Annotated[str, typer.Option(help="the sidecar's policy")] = "goodput",
    steps: Annotated[int, typer.Option(min=10, help="steps of each loop")] = 500,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure the round trip to the sidecar, and what it costs the engine's thread."""
    try:
        make_policy(policy, None, LIMITS)
        with sidecar(policy) as target:
            measured = measure(target, requests, steps)
    except (OSError, ValueError) as error:
        typer.echo(f"parlay bench rpc: {error}", err=True)
        raise typer.Exit(1) from None
    figures: dict[str, object] = {"requests": requests, "policy": policy, "steps": steps}
    figures.update(measured)
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        typer.echo(f"{name:22} {shown!s:8} {_MEANING.get(name, '')}".rstrip())
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure(target: str, requests: int, steps: int) -> dict[str, float]:
    """Return the figures: times in microseconds, shares of steps."""
    closed, paced, hidden = [_loop(target, requests, steps, *how) for how in _LOOPS]
    return {
        **_percentiles("", closed.stats.engine_thread_us),
        **_percentiles("paced_", paced.stats.engine_thread_us),
        **_percentiles("engine_thread_", hidden.stats.engine_thread_us),
        "fresh_share": hidden.stats.fresh_share,
    }


_LOOPS = ((True, 0.0), (True, PACE_S), (False, PACE_S))


def _loop(
    target: str, requests: int, steps: int, synchronous: bool, pace_s: float
) -> RemotePlanner:
    """Run a made-up engine against the sidecar; return its planner, closed."""
    info = EngineInfo(f"bench-{synchronous}-{pace_s}", LIMITS)
    planner = RemotePlanner(target, info, LocalPlanner(make_policy("none")), synchronous)
    history = History(requests)
    with contextlib.closing(planner):
        _connect(planner)
        for step in range(WARM_UP_STEPS + steps):
            if step == WARM_UP_STEPS:
                planner.stats = RemoteStats()
            end_s = time.perf_counter() + pace_s
            outcome = history.step(*planner.plan(history.view()))
            planner.observe(outcome)
            _spend(end_s)
    if synchronous and planner.stats.plans_local == steps:
        raise OSError(f"the sidecar sent no plan: {planner.stats.last_error or 'it was silent'}")
    return planner


def _connect(planner: RemotePlanner) -> None:
    deadline_s = time.monotonic() + START_S
    while not planner.connected:
        if time.monotonic() > deadline_s:
            raise OSError(f"no sidecar: {planner.stats.last_error or 'it was silent'}")
        time.sleep(0.01)


def _spend(end_s: float) -> None:
    """Pass the rest of a paced step: a part busy, the rest asleep as in a kernel."""
    busy_s = min(end_s, time.perf_counter() + BUSY_S)
    while time.perf_counter() < busy_s:
        pass
    time.sleep(max(0.0, end_s - time.perf_counter()))


def _percentiles(prefix: str, samples_us: Iterable[float]) -> dict[str, float]:
    p50, p99 = np.percentile(list(samples_us), [50, 99])
    return {f"{prefix}p50_us": float(p50), f"{prefix}p99_us": float(p99)}
