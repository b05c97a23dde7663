"""The modes that the demo compares: no speculation, statics, a gate, and the sidecar's policy."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from parlay.engine.backend import Backend
from parlay.engine.demo.stats import ADAPTIVE, NONE
from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.step import Engine, EngineConfig
from parlay.policies.policy import EngineLimits, make_policy

START_S = 30.0
"""A sidecar that does not listen by then has failed."""


@dataclass(slots=True, frozen=True)
class Mode:
    """A name for tables and the policy behind it, in this process or under a sidecar."""

    name: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sidecar: bool = False


STATICS = (
    Mode(NONE, "none"),
    Mode("ngram-3", "fixed", {"proposer": "ngram", "k": 3}),
    Mode("ngram-7", "fixed", {"proposer": "ngram", "k": 7}),
    Mode("draft-1", "fixed", {"proposer": "draft_model", "k": 1}),
    Mode("draft-3", "fixed", {"proposer": "draft_model", "k": 3}),
    Mode("gate", "ngram_gate"),
)


def demo_modes(policy: str) -> tuple[Mode, ...]:
    """Return every mode, the adaptive one under `policy`."""
    return (*STATICS, Mode(ADAPTIVE, policy, sidecar=True))


@dataclass(slots=True)
class Lane:
    """A mode and its engine; lanes share one backend and take turns, each from empty to empty."""

    mode: Mode
    engine: Engine


def open_lanes(
    stack: ExitStack,
    modes: tuple[Mode, ...],
    backend: Backend,
    config: EngineConfig,
    eos_ids: tuple[int, ...],
) -> list[Lane]:
    """Make each mode's engine; sidecars and threads end with `stack`. Raises ValueError."""
    lanes = []
    for mode in modes:
        planner = _planner(stack, mode, backend.limits())
        lanes.append(Lane(mode, Engine(backend, planner, config, eos_ids=eos_ids)))
    return lanes


def _planner(stack: ExitStack, mode: Mode, limits: EngineLimits) -> Planner:
    policy = make_policy(mode.policy, mode.settings, limits)
    if not mode.sidecar:
        return LocalPlanner(policy)
    target = stack.enter_context(sidecar(mode.policy))
    # Until the first plan comes, and if the sidecar dies, nothing is speculated.
    fallback = LocalPlanner(make_policy("none", {}, limits))
    planner = RemotePlanner(target, EngineInfo("demo", limits), fallback)
    stack.callback(planner.close)
    return planner


def sidecar_figures(lanes: Sequence[Lane]) -> dict[str, float]:
    """Return what asking the sidecar cost (engine thread, us a step) and how fresh plans were."""
    (planner,) = (p for lane in lanes if isinstance(p := lane.engine.planner, RemotePlanner))
    stats = planner.stats
    return {
        "engine_thread_us_p50": median(stats.engine_thread_us),
        "fresh_share": stats.fresh_share,
        "steps_without_plan": stats.plans_local,
        "dropped_reports": stats.dropped_reports,
        "reconnects": stats.reconnects,
    }


@contextmanager
def sidecar(policy: str) -> Iterator[str]:
    """Run `parlay serve` as a process on a Unix socket of its own; yields its address."""
    with (
        tempfile.TemporaryDirectory(prefix="parlay-") as folder,
        tempfile.TemporaryFile() as errors,
    ):
        socket = Path(folder) / "sidecar.sock"
        command = [
            sys.executable,
            "-m",
            "parlay.controller",
            "--listen",
            f"unix:{socket}",
            "--policy",
            policy,
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            _await_socket(process, socket, errors)
            yield f"unix:{socket}"
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_socket(process: subprocess.Popen[bytes], socket: Path, errors: IO[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while not socket.exists():
        if process.poll() is not None:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            raise ValueError(
                f"the sidecar ended at once: {said[-1] if said else 'it said nothing'}"
            )
        if time.monotonic() > deadline_s:
            raise ValueError(f"the sidecar did not listen within {START_S:.0f} s")
        time.sleep(0.05)
