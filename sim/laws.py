"""Tasks: how each accepts, and its lengths; the built-in ones and those fitted from logs.

The built-in ones are in `tasks.toml`. A fitted file (`parlay calibrate acceptance`) is JSON,
whose tasks hold the same fields and the share of requests that each was seen with.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parlay.policies.files import fault_of, write_json
from parlay.policies.types import Proposer
from parlay.sim.latent import COLD_FACTOR, TaskLaw

TASKS = Path(__file__).parent / "tasks.toml"
KIND = "parlay.acceptance/1"
"""What a fitted file says it is."""
SUFFIX = ".json"
"""A fitted file's name ends so; a recorded trace, JSON lines, is named otherwise."""


@dataclass(slots=True, frozen=True)
class Task:
    """One task: how it accepts, and the log-normal lengths (median tokens, sigma).

    share: of the requests that it was fitted with.
    """

    law: TaskLaw
    prompt: tuple[float, float]
    output: tuple[float, float]
    share: float = 1.0

    @property
    def proposers(self) -> frozenset[int]:
        """Return the proposers whose acceptance is known."""
        return frozenset(self.law.accept)


@cache
def tasks() -> Mapping[str, Task]:
    """Return every built-in task by its tag."""
    with TASKS.open("rb") as file:
        return {tag: _task(raw) for tag, raw in tomllib.load(file).items()}


def is_fitted(path: str) -> bool:
    """Say whether a file of acceptance is a fitted one, by its name."""
    return path.endswith(SUFFIX)


@cache
def read_fitted(path: str) -> Mapping[str, Task]:
    """Return a fitted file's tasks; raises ValueError in one line where it is none."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("kind") != KIND:
            raise ValueError(f"its kind is not '{KIND}'")
        found = {str(tag): _task(of) for tag, of in raw["tasks"].items()}
        if not found:
            raise ValueError("it has no tasks")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no fitted acceptance ({fault_of(error)}): make one with"
            " `parlay calibrate acceptance`; a recorded trace is named .jsonl"
        ) from None
    return found


def write_fitted(path: Path, found: Mapping[str, Task], sources: Sequence[str]) -> None:
    """Write fitted tasks, whole or not at all."""
    write_json(
        path,
        {"kind": KIND, "sources": list(sources), "tasks": {t: _raw(of) for t, of in found.items()}},
    )


def _raw(task: Task) -> dict[str, Any]:
    law = task.law
    chains = {Proposer(p).name.lower(): list(chain) for p, chain in law.accept.items()}
    return {
        "share": task.share,
        "match_rate": law.match_rate,
        **chains,
        "shift_sd": law.shift_sd,
        "phase_shift": law.phase_shift,
        "cold_factor": law.cold_factor,
        "prompt": list(task.prompt),
        "output": list(task.output),
    }


def _task(raw: Mapping[str, Any]) -> Task:
    accept = {int(p): tuple(raw[p.name.lower()]) for p in Proposer if p.name.lower() in raw}
    law = TaskLaw(
        _number(raw, "match_rate", 1.0),
        accept,
        _number(raw, "shift_sd", 10.0),
        _number(raw, "phase_shift", 10.0),
        _number({"cold_factor": COLD_FACTOR, **raw}, "cold_factor", 1.0),
    )
    for proposer, chain in accept.items():
        if not chain or any(not 0.0 <= float(p) <= 1.0 for p in chain):
            raise ValueError(f"{Proposer(proposer).name.lower()} needs probabilities by place")
    (prompt, spread), (output, wide) = raw["prompt"], raw["output"]
    share = _number({"share": 1.0, **raw}, "share", 1.0)
    return Task(law, (float(prompt), float(spread)), (float(output), float(wide)), share)


def _number(raw: Mapping[str, Any], name: str, most: float) -> float:
    value = float(raw[name])
    if not 0.0 <= value <= most:
        raise ValueError(f"{name} must be from 0 to {most:g}, not {value:g}")
    return value
