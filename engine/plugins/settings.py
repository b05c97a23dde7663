"""What decides in a plugin: a policy in this process, or a sidecar with that policy behind it.

Arguments win over the environment: PARLAY_POLICY (a name), PARLAY_SET (`key=value` pairs between
spaces), PARLAY_SIDECAR (unix:/path or host:port), PARLAY_ENGINE_ID. Free of torch.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.sparing import SparingPlanner
from parlay.policies import DEFAULT_POLICY
from parlay.policies.policy import EngineLimits, make_policy

_SHARE, _MOST_STEPS = 0.01, 8
"""Others' engines leave a policy's arrays colder than ours does; asked half as often as there, it
drafted as well in vLLM."""
_count = itertools.count()


@dataclass(slots=True, frozen=True)
class PluginSettings:
    """policy and its values; sidecar: its address, None for none; engine_id: who we are to it."""

    policy: str = DEFAULT_POLICY
    values: Mapping[str, Any] = field(default_factory=dict)
    sidecar: str | None = None
    engine_id: str | None = None


def read_settings(
    policy: str | None = None,
    values: Mapping[str, Any] | None = None,
    sidecar: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> PluginSettings:
    """Return the settings from arguments, then the environment, then the defaults.

    PARLAY_SET belongs to PARLAY_POLICY (or the default): it is ignored beside a `policy` argument.
    Raises ValueError where PARLAY_SET is not of pairs.
    """
    named = environ.get("PARLAY_SET", "") if policy is None else ""
    return PluginSettings(
        policy=policy or environ.get("PARLAY_POLICY") or DEFAULT_POLICY,
        values=_pairs(named) if values is None else values,
        sidecar=sidecar or environ.get("PARLAY_SIDECAR") or None,
        engine_id=environ.get("PARLAY_ENGINE_ID") or None,
    )


def make_planner(settings: PluginSettings, engine: str, limits: EngineLimits) -> Planner:
    """Return what decides for the engine of kind `engine`.

    Raises ValueError where the policy, one of its values or the sidecar's address makes no sense.
    """
    local = LocalPlanner(make_policy(settings.policy, settings.values, limits))
    if settings.sidecar is None:
        return local
    # gRPC starts threads at import: only who asks for a sidecar gets them.
    from parlay.engine.remote import EngineInfo, RemotePlanner

    # Two engines of one id would turn each other out.
    name = settings.engine_id or f"{engine}-{platform.node()}-{os.getpid()}-{next(_count)}"
    return RemotePlanner(settings.sidecar, EngineInfo(name, limits), local)


def sparing_planner(settings: PluginSettings, engine: str, limits: EngineLimits) -> Planner:
    """Return what `make_planner` does, a policy in this process asked as often as it is worth.

    By a clock: not for processes that must decide alike.
    """
    planner = make_planner(settings, engine, limits)
    if not isinstance(planner, LocalPlanner):
        return planner
    return SparingPlanner(planner.policy, share=_SHARE, most_steps=_MOST_STEPS)


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split()]
    for key, equals, value in pairs:
        if not key or not equals:
            raise ValueError(
                f"PARLAY_SET: write {key + value!r} as key=value, pairs between spaces"
            )
    return {key: value for key, _, value in pairs}
