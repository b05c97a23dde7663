"""`parlay bench decide`: what a policy's decision costs, and fitting and learning beside it.

Needs no library but numpy: the command line reads the options off the function's arguments,
its help off the docstring. Raises ValueError where there is no such policy or nothing to measure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.files import check_writable, write_json
from parlay.policies.policy import Policy, make_policy, registry
from parlay.policies.synthetic import LIMITS, History

REQUESTS = (1, 32, 256)
WARM_UP_STEPS = 30
"""Learning begins here, and the first steps pay for what is made once."""
_COLUMNS = ("p50_us", "p99_us", "fit_p50_us", "observe_p50_us")
_BAR = 30


def bench_decide(policy: str = "", steps: int = 200, json: Path | None = None) -> None:
    """Time decide, fit_plan and observe of every policy, or one, at 1, 32 and 256 requests.

    --steps are measured at each size, after some to warm up; --json names a file for the figures.
    """
    if steps < 1:
        raise ValueError(f"bench decide: --steps must be 1 or more, not {steps}")
    names = [policy] if policy else sorted(registry())
    make_policy(names[0], None, LIMITS)
    if json is not None:
        check_writable(json)
    made = [(name, requests) for name in names for requests in REQUESTS]
    shown = sys.stderr.isatty()
    rows = [measure(name, requests, steps) for name, requests in _progress(made, shown)]
    print("\n".join(_table(rows)))
    if json is not None:
        write_json(json, {"rows": rows})


def measure(name: str, requests: int, steps: int) -> dict[str, Any]:
    """Return one row of the report: microseconds of each call, over `steps` steps."""
    policy, history = make_policy(name, None, LIMITS), History(requests)
    took_us = np.array([_step_us(policy, history) for _ in range(WARM_UP_STEPS + steps)])
    decide_us, fit_us, observe_us = took_us[WARM_UP_STEPS:].T
    p50_us, p99_us = np.percentile(decide_us, [50, 99])
    figures = p50_us, p99_us, np.median(fit_us), np.median(observe_us)
    rounded = {column: round(float(us), 2) for column, us in zip(_COLUMNS, figures, strict=True)}
    return {"policy": name, "requests": requests, **rounded}


def _step_us(policy: Policy, history: History) -> tuple[float, float, float]:
    """Run one step; return what decide, fit_plan and observe took."""
    view = history.view()
    decide_us, plan = _timed(lambda: policy.decide(view))
    fit_us, _ = _timed(lambda: fit_plan(plan, view))
    outcome = history.step(plan)
    observe_us, _ = _timed(lambda: policy.observe(outcome))
    return decide_us, fit_us, observe_us


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin_ns = time.perf_counter_ns()
    found = call()
    return 1e-3 * (time.perf_counter_ns() - begin_ns), found


def _progress(made: list[tuple[str, int]], shown: bool) -> Iterable[tuple[str, int]]:
    """Yield what is to be measured, under a bar where a terminal shows it."""
    for done, (name, requests) in enumerate(made):
        if shown:
            bar = "#" * (_BAR * done // len(made))
            doing = f"{name}, {requests} requests"
            print(f"\r[{bar:{_BAR}}] {doing:40}", end="", file=sys.stderr, flush=True)
        yield name, requests
    if shown:
        print("\r" + " " * (_BAR + 43) + "\r", end="", file=sys.stderr, flush=True)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    lines = [f"{'policy':{width}} {'requests':>8}" + "".join(f" {c:>14}" for c in _COLUMNS)]
    lines += [
        f"{row['policy']:{width}} {row['requests']:8}"
        + "".join(f" {row[column]:14.1f}" for column in _COLUMNS)
        for row in rows
    ]
    return lines
