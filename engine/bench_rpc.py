"""`parlay bench rpc`: what asking the sidecar costs, with a sidecar in a process of its own."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from parlay.engine.bench_fleet import measure_fleet, percentiles
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner, RemoteStats
from parlay.engine.sidecar import START_S, sidecar, sidecar_process
from parlay.policies.files import write_json
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History

_MEANING = {
    "p50_us": "from a report to its plan, step after step",
    "paced_p50_us": "the same with a step each 10 ms",
    "engine_thread_p50_us": "what a step costs the engine's own thread, which never waits",
    "fresh_share": "steps that followed a plan of the newest report or the one before",
    "engines_p50_us": "from a report to its plan, 64 requests and a step each 10 ms everywhere",
    "engines_lost": "reports that no plan came back for",
    "engines_p99_tenths_us": "the same by tenths of the time: one that stands out was disturbed",
    "engines_memory_end_mb": "of the sidecar's process",
    "engines_sidecar_cores": "that the sidecar kept busy",
    "engines_stolen_share": "of this machine's time, by its host's other guests",
}
WARM_UP_STEPS = 50
PACE_S = 0.010
BUSY_S = 0.002
"""How much of a paced step holds the interpreter, as an engine's own Python does."""


def bench_rpc(
    requests: Annotated[int, typer.Option(min=1, max=4096, help="rows of the batch")] = 256,
    policy: Annotated[str, typer.Option(help="the sidecar's policy")] = "pilot",
    steps: Annotated[int, typer.Option(min=10, help="steps of each loop")] = 500,
    engines: Annotated[
        int, typer.Option(min=0, max=64, help="then ask a sidecar from so many engines at once")
    ] = 0,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="for so long")] = 60.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure the round trip to the sidecar, and what it costs the engine's thread."""
    figures: dict[str, object] = {"requests": requests, "policy": policy, "steps": steps}
    try:
        make_policy(policy, None, LIMITS)
        with sidecar(policy) as target:
            figures.update(measure(target, requests, steps))
        if engines:
            with sidecar_process(policy) as (target, pid):
                figures.update(engines=engines, seconds=seconds)
                figures.update(measure_fleet(target, pid, engines, seconds))
    except (OSError, ValueError) as error:
        typer.echo(f"parlay bench rpc: {error}", err=True)
        raise typer.Exit(1) from None
    for name, value in figures.items():
        typer.echo(f"{name:23} {_shown(value):8} {_MEANING.get(name, '')}".rstrip())
    if json_file is not None:
        write_json(json_file, figures)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_shown(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure(target: str, requests: int, steps: int) -> dict[str, float]:
    """Return the figures: times in microseconds, shares of steps."""
    closed, paced, hidden = [_loop(target, requests, steps, *how) for how in _LOOPS]
    return {
        **percentiles("", closed.stats.engine_thread_us),
        **percentiles("paced_", paced.stats.engine_thread_us),
        **percentiles("engine_thread_", hidden.stats.engine_thread_us),
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
