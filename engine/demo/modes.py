"""The modes that the demo compares: no speculation, statics, a gate, and the sidecar's policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from parlay.engine.backend import Backend
from parlay.engine.demo.stats import ADAPTIVE, NONE
from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.sidecar import sidecar
from parlay.engine.step import Engine, EngineConfig
from parlay.policies.policy import EngineLimits, make_policy


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
    config = replace(config, prefix_cache=False)  # prompts come again, and shall cost what they did
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
