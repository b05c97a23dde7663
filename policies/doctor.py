"""Checks of an installation: each package registers its own, `parlay doctor` runs them all.

A check is an entry point in the group `parlay.doctor`: a function that takes what was asked and
yields findings. What a package needs and is not installed is a finding too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

from parlay.policies.policy import every_policy, make_policy
from parlay.policies.synthetic import LIMITS, History

GROUP = "parlay.doctor"
PLUGINS = "plugins"
"""The check that looks at other engines."""
_EXTRAS = {"torch": "engine", "redis": "redis", "starlette": "web", "pyarrow": "log"}


class Verdict(StrEnum):
    """How bad a finding is: a warning leaves the installation usable."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(slots=True, frozen=True)
class Finding:
    """What was looked at, what was found, and how to mend it."""

    verdict: Verdict
    what: str
    text: str
    mend: str = ""


@dataclass(slots=True, frozen=True)
class Asked:
    """What to look at: the file of `parlay serve --config`, a sidecar's address, a model's folder.

    None: what the environment says, else the defaults. engine: one that a plugin of ours steers, of
    which alone is spoken then.
    """

    config: Path | None = None
    sidecar: str | None = None
    model: Path | None = None
    engine: str | None = None


Check = Callable[[Asked], Iterable[Finding]]


def examine(asked: Asked, points: Iterable[EntryPoint] | None = None) -> Iterator[Finding]:
    """Run every registered check; one that breaks is a finding, and the others go on."""
    found = entry_points(group=GROUP) if points is None else points
    if asked.engine is not None:
        found = [point for point in found if point.name == PLUGINS]
    for point in sorted(found, key=lambda point: point.name):
        try:
            check: Check = point.load()
            yield from check(asked)
        except ModuleNotFoundError as error:
            yield missing(point.name, error)
        except Exception as error:
            said = " ".join(str(error).split())
            yield Finding(Verdict.FAIL, point.name, f"{type(error).__name__}: {said}")


def missing(what: str, error: ModuleNotFoundError) -> Finding:
    """Return the finding that a module is not installed."""
    module = (error.name or "").split(".")[0]
    mend = f"pip install 'parlay[{_EXTRAS[module]}]'" if module in _EXTRAS else ""
    return Finding(Verdict.WARN, what, f"not checked: {error.name} is not installed", mend)


def checks(asked: Asked) -> Iterator[Finding]:
    """Check that the policies load, and that the default one decides."""
    known = every_policy()
    text = f"parlay {version('parlay')}, {len(known)} policies"
    yield Finding(Verdict.OK, "policies", text)
    history, policy = History(4), make_policy("goodput", {}, LIMITS)
    for _ in range(3):
        view, begin = history.view(), time.perf_counter()
        plan = policy.decide(view)
        took_ms = 1e3 * (time.perf_counter() - begin)
        policy.observe(history.step(plan))
    text = f"goodput decides for {len(plan.request_id)} requests in {took_ms:.1f} ms"
    yield Finding(Verdict.OK, "policies", text)
