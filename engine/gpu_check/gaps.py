"""How long a device waits for the host between the steps of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from parlay.engine.gpu_check.engine_run import Lane, Mode, has_room
from parlay.engine.request import Request

BAR_US = 200.0
"""The host's gap between two steps is at most so long."""
PLANNED = Mode("goodput", "goodput")
MODES = (
    Mode("none", "none"),
    Mode("draft-3", "fixed", {"proposer": "draft_model", "k": 3}),
    PLANNED,
    Mode("goodput, overlapped", "goodput", overlap=True),
)
_STEP = "parlay.step"
_WARM_UP_STEPS = 10

Span = tuple[float, float]
"""Begin and end, in us."""


@dataclass(slots=True, frozen=True)
class Gaps:
    """us by step: between the last kernel of the step before and the first one of this, and all the
    time in which no kernel ran.
    """  # noqa: D205

    between_us: list[float]
    idle_us: list[float]


def gaps_of(kernels: Sequence[Span], steps: Sequence[Span]) -> Gaps:
    """Find the gaps before every step but the first; kernels may overlap, and cross steps."""
    kernels, steps = sorted(kernels), sorted(steps)
    between, idle = [], []
    for (before, _), (start, _) in pairwise(steps):
        ended = [end for begin, end in kernels if begin < start]
        began = [begin for begin, _ in kernels if begin >= start]
        if ended and began:
            between.append(max(began[0] - max(ended), 0.0))
        busy, upto = 0.0, before
        for begin, end in kernels:
            begin, end = max(begin, upto), min(end, start)
            if end > begin:
                busy, upto = busy + end - begin, end
        idle.append(start - before - busy)
    return Gaps(between, idle)


def measure_gaps(lane: Lane, steps: int) -> dict[str, Any]:
    """Return the gaps of a lane's decoding steps, by the profiler on a GPU.

    Elsewhere, and where that sees no kernels, by the host's clock: what of a step is in no pass.
    """
    requests = lane.begin()
    for _ in range(_WARM_UP_STEPS):
        lane.engine.step()
    found = None
    if lane.device.type == "cuda":
        found = _profiled(lambda: lane.engine.step() if has_room(requests) else None, steps)
    figures: dict[str, Any]
    if found is not None and found.between_us:
        figures = {
            "how": "profiler: from a step's last kernel to the next one's first",
            "gap_us": median(found.between_us),
            "idle_us": median(found.idle_us),
        }
    else:
        figures = {
            "how": "host clock: what of a step is in no pass",
            "gap_us": _host_us(lane, requests, steps),
            "idle_us": None,
        }
    lane.end(requests)
    passed = bool(figures["gap_us"] <= BAR_US)
    return {"mode": lane.mode.name, "batch": lane.batch, **figures, "passed": passed}


def bar_of(gaps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge all gaps but PLANNED's: there the policy decides, hence the overlapped loop."""
    judged = [gap for gap in gaps if gap["mode"] != PLANNED.name]
    return {
        "bar": f"host gap between steps at most {BAR_US:.0f} us",
        "gap_us": max((float(gap["gap_us"]) for gap in judged), default=float("nan")),
        "how": judged[0]["how"] if judged else "",
        "passed": bool(judged) and all(gap["passed"] for gap in judged),
    }


def _host_us(lane: Lane, requests: Sequence[Request], steps: int) -> float:
    found = []
    for _ in range(steps):
        outcome = lane.engine.step() if has_room(requests) else None
        if outcome is not None:
            passes_ms = float(outcome.verify_ms) + float(outcome.draft_ms.sum())
            found.append(1e3 * (float(outcome.step_ms) - passes_ms))
    return median(found) if found else float("nan")


def _profiled(step: Callable[[], object], steps: int) -> Gaps:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            with record_function(_STEP):
                step()
        torch.cuda.synchronize()
    marks: list[Span] = []
    kernels: list[Span] = []
    for event in seen.events() or ():
        span = (float(event.time_range.start), float(event.time_range.end))
        if event.device_type == DeviceType.CPU:
            if event.name == _STEP:
                marks.append(span)
        elif event.name != _STEP and not event.name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    return gaps_of(kernels, marks)
