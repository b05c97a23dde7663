"""What a planner costs the thread of the step loop, without the work of what stands in for it."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from parlay.engine.planner import Planner
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome

MOST_MS = 2.0
MOST_WALL_MS = 150.0
"""A busy machine may take the thread off its core for tens of milliseconds; to wait for a sidecar
(200 ms away, silent for a second, frozen for five) takes longer."""


@dataclass(slots=True)
class Meter:
    """Nanoseconds of each step: of the thread's own CPU, and by the clock.

    paused: how often this whole process was stopped and went on, which no clock knows of.
    """

    cpu_ns: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)
    paused: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice pauses, and keep what is alive out of garbage collections.

        Those that fall into a step look at what is new, not at all of torch. For the main thread.
        """

        def went_on(number: int, frame: object) -> None:
            self.paused += 1

        before = signal.signal(signal.SIGCONT, went_on)
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            signal.signal(signal.SIGCONT, before)

    @contextmanager
    def counted(self, sign: int) -> Iterator[None]:
        """Add what the block takes to the newest step, or take it off."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            self.cpu_ns[-1] += sign * (time.thread_time_ns() - cpu)
            self.wall_ns[-1] += sign * (time.perf_counter_ns() - wall)

    def check(self) -> None:
        """Assert that no step's planning took the engine's thread more than it may."""
        cpu_ms, wall_ms = (1e-6 * np.array(ns) for ns in (self.cpu_ns, self.wall_ns))
        assert len(cpu_ms) > 0
        # The bound is on CPU time: on a machine that others load, any thread may lose its core.
        assert cpu_ms.max() <= MOST_MS, np.sort(cpu_ms)[-5:]
        assert np.median(wall_ms) <= MOST_MS, np.median(wall_ms)
        assert self.paused or wall_ms.max() <= MOST_WALL_MS, np.sort(wall_ms)[-5:]


class Metered:
    """A planner that notes what it costs. sign 1: each plan begins a step; -1: is taken off it."""

    def __init__(self, planner: Planner, meter: Meter, sign: int = 1) -> None:
        self._planner, self._meter, self._sign = planner, meter, sign

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Pass on."""
        if self._sign > 0:
            self._meter.cpu_ns.append(0)
            self._meter.wall_ns.append(0)
        with self._meter.counted(self._sign):
            return self._planner.plan(view)

    def observe(self, outcome: StepOutcome) -> None:
        """Pass on."""
        with self._meter.counted(self._sign):
            self._planner.observe(outcome)

    def close(self) -> None:
        """Pass on."""
        self._planner.close()
