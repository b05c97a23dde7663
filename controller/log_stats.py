"""What is in a decision log, summed up step by step: for `parlay log stats`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlay.policies.log_schema import LoggedStep
from parlay.policies.types import PROPOSERS, Array, PlanSource, Proposer

UNKNOWN = "unknown"
"""Stands for the version where the plan was none of the sidecar's."""
_SUMS = ("rows", "drafting", "drafted", "verified", "accepted", "emitted")


@dataclass(slots=True)
class Sums:
    """Sums over the rows of one policy version, by the proposer that ran; f64 [PROPOSERS] each."""

    steps: int = 0
    step_ms: float = 0.0
    sampled: bool = False
    known: int = 0
    draws: int = 0
    by_proposer: dict[str, Array] = field(
        default_factory=lambda: {name: np.zeros(PROPOSERS) for name in _SUMS}
    )

    def add(self, step: LoggedStep) -> None:
        """Add a step; known: rows with a propensity; draws: those with one below 1."""
        outcome, propensity = step.outcome, step.fit.propensity
        self.steps += 1
        self.step_ms += outcome.step_ms
        self.sampled |= step.rows_in_step > len(step.view)
        self.known += int((propensity > 0.0).sum())
        self.draws += int(((propensity > 0.0) & (propensity < 1.0)).sum())
        values = {
            "rows": np.ones(len(outcome)),
            "drafting": outcome.drafted_k > 0,
            "drafted": outcome.drafted_k,
            "verified": outcome.verified_k,
            "accepted": outcome.accepted,
            "emitted": outcome.emitted,
        }
        for name, value in values.items():
            self.by_proposer[name] += np.bincount(outcome.proposer, value, minlength=PROPOSERS)

    def total(self, name: str) -> float:
        """Return a sum over all proposers."""
        return float(self.by_proposer[name].sum())


@dataclass(slots=True)
class LogStats:
    """The sums of a log by policy version, and what they were summed over."""

    policies: dict[str, Sums] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    sources: Array = field(default_factory=lambda: np.zeros(len(PlanSource)))
    ended: int = 0
    prompt_rows: int = 0


def stats_of(steps: Iterable[LoggedStep]) -> LogStats:
    """Sum up a log; holds one step at a time."""
    found = LogStats()
    for step in steps:
        found.policies.setdefault(step.policy_version or UNKNOWN, Sums()).add(step)
        found.engines[step.engine] = found.engines.get(step.engine, 0) + 1
        found.sources += np.bincount(step.outcome.plan_source, minlength=len(PlanSource))
        found.ended += int((step.outcome.truncated_by > 0).sum())
        found.prompt_rows += int((step.view.prefill_tokens > 0).sum())
    return found


def policy_figures(sums: Sums) -> dict[str, Any]:
    """Return one version's figures: shares in [0, 1], k and tokens a row and step, ms a step.

    tokens_per_s is emitted tokens over step time; None where the log keeps a sample of requests.
    """
    rows, drafting = sums.total("rows"), sums.total("drafting")
    goodput = None if sums.sampled else _ratio(1e3 * sums.total("emitted"), sums.step_ms)
    return {
        "steps": sums.steps,
        "rows": int(rows),
        "tokens_per_s": goodput,
        "step_ms": _ratio(sums.step_ms, sums.steps),
        "emitted_per_row": _ratio(sums.total("emitted"), rows),
        "drafting": _ratio(drafting, rows),
        "mean_k": _ratio(sums.total("drafted"), drafting),
        "accepted": _ratio(sums.total("accepted"), sums.total("verified")),
        "known": _ratio(sums.known, rows),
        "drawn": _ratio(sums.draws, rows),
    }


def proposer_figures(stats: LogStats) -> dict[str, dict[str, Any]]:
    """Return, by the name of each proposer that drafted: rows, mean k, and the share accepted."""
    found = {}
    for proposer in list(Proposer)[1:]:
        sums = {
            name: sum(float(s.by_proposer[name][proposer]) for s in stats.policies.values())
            for name in _SUMS
        }
        if sums["drafting"]:
            found[proposer.name.lower()] = {
                "rows": int(sums["drafting"]),
                "mean_k": _ratio(sums["drafted"], sums["drafting"]),
                "verified_k": _ratio(sums["verified"], sums["drafting"]),
                "accepted": _ratio(sums["accepted"], sums["verified"]),
            }
    return found


def as_json(stats: LogStats) -> dict[str, Any]:
    """Return all figures as plain values; None where there is nothing to divide by."""
    names = [source.name.lower() for source in PlanSource]
    return {
        "steps": sum(sums.steps for sums in stats.policies.values()),
        "rows": int(sum(sums.total("rows") for sums in stats.policies.values())),
        "requests_ended": stats.ended,
        "prompt_rows": stats.prompt_rows,
        "steps_by_engine": stats.engines,
        "rows_by_plan_source": dict(zip(names, stats.sources.astype(int).tolist(), strict=True)),
        "policies": {name: policy_figures(sums) for name, sums in stats.policies.items()},
        "proposers": proposer_figures(stats),
    }


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
