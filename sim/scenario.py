"""A scenario: who asks for what, when, and what steps cost; read from a TOML file and checked."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parlay.sim.laws import Task, is_fitted, read_fitted, tasks

FOLDER = Path(__file__).parent / "scenarios"


@dataclass(slots=True, frozen=True)
class Stage:
    """A stretch of steps (0: all) with one load; concurrency 0: as requests arrive."""

    mix: Mapping[str, float]
    concurrency: int = 0
    steps: int = 0


@dataclass(slots=True, frozen=True)
class Scenario:
    """What a policy is judged on.

    stages follow one another and begin again. steps are measured after warm_up_steps; runs: fresh
    starts whose steps are added up. arrivals: trace and mean_concurrency of an open loop. lengths:
    the trace whose lengths replace the tasks'. kv_requests: requests of full length that the cache
    holds (0: plenty). acceptance: a counterfactual trace to replay instead of the tasks, or a file
    of fitted ones. prefix_cache: prompts that begin alike are computed once, as long as the cache
    holds them; shared_prefix: share of a closed loop's requests that begin with a text of so many
    tokens, before their own prompt.
    catches_up: the draft model pays for what it has not read.
    """

    name: str
    title: str
    costs: str
    stages: tuple[Stage, ...]
    steps: int = 4000
    warm_up_steps: int = 200
    runs: int = 1
    plan_delay_steps: int = 0
    catches_up: bool = False
    kv_requests: int = 0
    acceptance: str = ""
    arrivals: Mapping[str, Any] = field(default_factory=dict)
    lengths: Mapping[str, Any] = field(default_factory=dict)
    prefix_cache: bool = False
    shared_prefix: Mapping[str, float] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tags of all tasks that occur, in order of first mention."""
        return tuple(dict.fromkeys(task for stage in self.stages for task in stage.mix))

    @property
    def replays(self) -> bool:
        """Say whether acceptance is replayed from a recording."""
        return bool(self.acceptance) and not is_fitted(self.acceptance)

    @property
    def catalogue(self) -> Mapping[str, Task]:
        """Return the tasks that may occur, by tag: the built-in or the fitted ones."""
        return read_fitted(self.acceptance) if is_fitted(self.acceptance) else tasks()

    def fitted(self, path: str) -> Scenario:
        """Return the scenario with a file's fitted tasks, each as often as it was seen."""
        mix = {tag: task.share for tag, task in read_fitted(path).items()}
        stages = tuple(dataclasses.replace(stage, mix=mix) for stage in self.stages)
        return dataclasses.replace(self, stages=stages, acceptance=path)

    @property
    def most_running(self) -> int:
        """Return the largest number of requests at once; an open loop may queue beyond it."""
        open_loop = int(8 * float(self.arrivals.get("mean_concurrency", 0)))
        return max(max(stage.concurrency for stage in self.stages), open_loop)

    def shortened(self, steps: int) -> Scenario:
        """Return the scenario over fewer steps, its stages as much shorter."""
        share = steps / self.steps
        stages = tuple(
            dataclasses.replace(s, steps=max(1, round(s.steps * share)) if s.steps else 0)
            for s in self.stages
        )
        return dataclasses.replace(self, stages=stages, steps=steps)

    def stage_at(self, step: int) -> Stage:
        """Return the stage of a step, counted from the start of the run."""
        if len(self.stages) == 1:
            return self.stages[0]
        step %= sum(stage.steps for stage in self.stages)
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise AssertionError("stages cover every step")


def scenario_names() -> list[str]:
    """Return the names of the built-in scenarios."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def named_scenarios(text: str) -> list[Scenario]:
    """Return the scenarios of a list with commas, or 'all'; raises ValueError in one line."""
    names = scenario_names() if text == "all" else [name for name in text.split(",") if name]
    if not names:
        raise ValueError("name at least one scenario, or 'all'")
    return [load_scenario(name) for name in names]


def load_scenario(name: str) -> Scenario:
    """Return a built-in scenario, or the one in a file; raises ValueError in one line."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(scenario_names())
        raise ValueError(f"unknown scenario '{name}': give a .toml file or one of {known}")
    raw = _parsed(path)
    try:
        stages = tuple(Stage(**stage) for stage in raw.pop("stage"))
        found = Scenario(name=path.stem, stages=stages, **raw)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"scenario {path}: {_said(error)}") from None
    _check(path, found)
    return found


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return str(error).replace("Scenario.__init__()", "it").replace("Stage.__init__()", "a stage")


def _check(path: Path, scenario: Scenario) -> None:
    """Refuse what could not run."""
    faults = [
        (not scenario.stages, "it needs at least one [[stage]]"),
        (min(scenario.steps, scenario.runs) < 1, "steps and runs must be at least 1"),
        (scenario.warm_up_steps < 0, "warm_up_steps must not be negative"),
        (scenario.plan_delay_steps < 0, "plan_delay_steps must not be negative"),
        (
            len(scenario.stages) > 1 and any(s.steps < 1 for s in scenario.stages),
            "with several stages each needs its steps",
        ),
        (
            not scenario.arrivals and any(s.concurrency < 1 for s in scenario.stages),
            "a stage needs a concurrency, or the scenario [arrivals]",
        ),
        (
            bool(scenario.arrivals) and not {"trace", "mean_concurrency"} <= set(scenario.arrivals),
            "[arrivals] needs trace and mean_concurrency",
        ),
    ]
    for stage in scenario.stages:
        unknown = sorted(set(stage.mix) - set(tasks()))
        faults.append((bool(unknown), f"no task {', '.join(unknown)}: use {', '.join(tasks())}"))
        shares = list(stage.mix.values())
        faults.append((not shares or min(shares) <= 0, "a mix needs shares above 0"))
    if scenario.shared_prefix:
        own = scenario.shared_prefix
        fits = set(own) == {"share", "tokens"} and 0.0 < own["share"] <= 1.0 <= own["tokens"]
        faults.append((not fits, "shared_prefix needs a share above 0, up to 1, and tokens"))
        from_trace = bool(scenario.arrivals or scenario.lengths)
        faults.append((from_trace, "a trace has its own prefixes: leave shared_prefix out"))
    for wrong, text in faults:
        if wrong:
            raise ValueError(f"scenario {path}: {text}")
