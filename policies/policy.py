"""The Policy protocol, and the registry that makes policies by name with checked settings."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from parlay.policies.types import PROPOSERS, Array, BatchView, Plan, StepOutcome


@dataclass(slots=True, frozen=True)
class EngineLimits:
    """What an engine can do, told once (Hello): bit mask of proposers, the largest k, padded token
    counts (empty: any), and the largest number of tokens in one step.
    """  # noqa: D205

    proposer_mask: int = (1 << PROPOSERS) - 1
    k_max: int = 16
    bucket_edges: tuple[int, ...] = ()
    token_budget: int = 512

    def has(self, proposer: int) -> bool:
        """Say whether the engine can run `proposer`."""
        return bool(self.proposer_mask >> proposer & 1)


class Policy(Protocol):
    """Decides what each request drafts; deterministic from its settings, seed and history.

    `decide` reads a view and returns a plan; `observe` learns from what a step did. `state` and
    `load` are plain arrays. `delta` and `merge` exchange what replicas learn: sufficient statistics
    since a state_version.
    """

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    def decide(self, view: BatchView) -> Plan:
        """Return the plan for the batch in `view`."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from one finished step."""
        ...

    def state(self) -> dict[str, Array]:
        """Return everything `load` needs to go on with the same decisions."""
        ...

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        ...

    def delta(self, since: int) -> dict[str, Array]:
        """Return the statistics gathered since state_version `since`."""
        ...

    def merge(self, deltas: list[dict[str, Array]]) -> None:
        """Add other replicas' deltas to what this policy knows."""
        ...


class Stateless:
    """The learning half of a policy that learns nothing."""

    def observe(self, outcome: StepOutcome) -> None:
        """Ignore the outcome."""

    def state(self) -> dict[str, Array]:
        """Return nothing: there is nothing to save."""
        return {}

    def load(self, state: Mapping[str, Array]) -> None:
        """Accept only what `state` returns."""
        if state:
            raise ValueError(f"this policy keeps no state, but got {sorted(state)}")

    def delta(self, since: int) -> dict[str, Array]:
        """Return nothing: there is nothing to share."""
        return {}

    def merge(self, deltas: list[dict[str, Array]]) -> None:
        """Ignore other replicas."""


Make = Callable[[Any, EngineLimits], Policy]
Settings = TypeVar("Settings")


@dataclass(slots=True, frozen=True)
class Entry:
    """One registered policy: its name, its settings' dataclass and how to make it."""

    name: str
    settings: type
    make: Make


_REGISTRY: dict[str, Entry] = {}
_MODULES = (
    "parlay.policies.baselines.none",
    "parlay.policies.baselines.fixed",
    "parlay.policies.baselines.hf_heuristic",
    "parlay.policies.baselines.batch_table",
    "parlay.policies.baselines.ngram_gate",
    "parlay.policies.baselines.gamma_tune",
    "parlay.policies.baselines.spec_dec_pp",
    "parlay.policies.baselines.svip",
    "parlay.policies.baselines.ada_edl",
    "parlay.policies.baselines.cascade",
    "parlay.policies.baselines.tetris",
    "parlay.policies.baselines.ema_tiers",
    "parlay.policies.baselines.suffix_length",
    "parlay.policies.baselines.goodput_batch",
    "parlay.policies.baselines.hf_confidence",
    "parlay.policies.baselines.survival_budget",
    "parlay.policies.bandits.ucb_spec",
    "parlay.policies.bandits.exp3_spec",
    "parlay.policies.bandits.beg_mab",
    "parlay.policies.bandits.linucb",
    "parlay.policies.bandits.thompson",
    "parlay.policies.bandits.nightjar",
    "parlay.policies.bandits.hedge_spec",
    "parlay.policies.goodput",
    "parlay.policies.pilot",
)
_NEED_A_FILE = {"learned": "parlay.policies.learned"}
"""Policies that no default settings make; modules with an ENTRY."""
_TRAINED = ".safetensors"


def register(
    name: str, settings: type[Settings]
) -> Callable[[Callable[[Settings, EngineLimits], Policy]], Any]:
    """Register a policy class or factory called with (settings, limits) under `name`."""

    def add(make: Callable[[Settings, EngineLimits], Policy]) -> Any:
        _REGISTRY[name] = Entry(name, settings, make)
        return make

    return add


def registry() -> dict[str, Entry]:
    """Return every policy that its default settings make, by name."""
    for module in _MODULES:
        importlib.import_module(module)
    return dict(_REGISTRY)


def every_policy() -> dict[str, Entry]:
    """Return every policy by name, those that need a file too."""
    from_file = {n: importlib.import_module(module).ENTRY for n, module in _NEED_A_FILE.items()}
    return {**registry(), **from_file}


def entry_of(name: str) -> Entry:
    """Return one policy's entry; raises ValueError where there is none of that name."""
    known = every_policy()
    if name not in known:
        raise ValueError(f"unknown policy '{name}'; choose one of {', '.join(sorted(known))}")
    return known[name]


def make_policy(
    name: str, settings: Mapping[str, Any] | None = None, limits: EngineLimits | None = None
) -> Policy:
    """Make the policy `name`; `settings` may hold strings, as from `--set key=value`.

    A file that `parlay train` wrote, as a name, is the policy `learned` with that path. Raises
    ValueError where the name or a setting is unknown, or a value has the wrong type or range.
    """
    if name.endswith(_TRAINED):
        name, settings = "learned", {**(settings or {}), "path": name}
    entry = entry_of(name)
    fields = {f.name: f for f in dataclasses.fields(entry.settings)}
    values: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        if key not in fields:
            known_settings = ", ".join(sorted(fields)) or "none"
            raise ValueError(f"policy '{name}' has no setting '{key}'; it has {known_settings}")
        values[key] = _parse(name, key, value, fields[key].default)
    return entry.make(entry.settings(**values), limits or EngineLimits())


def _parse(policy: str, key: str, value: Any, default: Any) -> Any:
    if not isinstance(value, str) or isinstance(default, str):
        return value
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, tuple):
            return tuple(type(default[0])(part) for part in value.split(","))
        return type(default)(value)
    except (ValueError, KeyError):
        kind = (
            f"values of type {type(default[0]).__name__}, separated by commas"
            if isinstance(default, tuple)
            else f"of type {type(default).__name__}"
        )
        raise ValueError(f"policy '{policy}': setting {key}={value} should be {kind}") from None
