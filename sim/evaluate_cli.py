"""`parlay evaluate`: what other policies would have earned on a log, before they are tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from parlay.policies.decision_log import LogReader
from parlay.policies.evaluate import ESTIMATORS, Estimate, direct_model, estimate
from parlay.policies.files import check_writable, write_json
from parlay.policies.log_schema import LoggedStep
from parlay.policies.policy import EngineLimits, Policy, make_policy, registry
from parlay.policies.replay import StepMs, learned_cost, replay
from parlay.sim.simulate import parse_policy

SEEDS = 3
"""Replays of a policy that draws; one that does not is replayed once."""
_COLUMNS = ("policy", "estimator", "tokens/s", "low", "high", "of the log", "effective requests")


def evaluate(
    log: Annotated[Path, typer.Argument(help="A log's folder, or one file of it.")],
    policy: Annotated[
        list[str], typer.Option(help="name:key=value/key=value; may be given several times.")
    ],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the estimates here.")
    ] = None,
) -> None:
    """Estimate from a decision log what other policies would have earned.

    Each estimate has an interval of 95% and the number of requests that it is worth. Where the log
    tells too little about a policy, it is refused with the reason; the status is 1 if all are.
    """
    makers = {text: _maker(text) for text in policy}
    for make, _ in makers.values():
        make(EngineLimits(), 0)
    if json_path is not None:
        check_writable(json_path)
    reader, seen = LogReader(log), Seen()
    cost = learned_cost(seen.watch(reader))
    limits = seen.limits()
    judged = []
    for text, (make, seeds) in makers.items():
        judged += judge(text, [make(limits, seed) for seed in range(seeds)], reader, cost)
    _show(judged)
    if json_path is not None:
        write_json(json_path, [dataclasses.asdict(one) for one in judged])
    if all(one.estimate is None for one in judged):
        raise typer.Exit(1)


@dataclass(slots=True, frozen=True)
class Judged:
    """One policy under one estimator: its estimate, or why there is none."""

    policy: str
    estimator: str
    estimate: Estimate | None
    refused: str = ""


@dataclass(slots=True)
class Seen:
    """What a log shows of its engine: proposers allowed, the largest k, padded token counts."""

    proposer_mask: int = 0
    k_max: int = 0
    bucket_edges: set[int] = field(default_factory=set)
    most_tokens: int = 0

    def watch(self, steps: LogReader) -> Iterator[LoggedStep]:
        """Pass a log's steps on, noting what they show."""
        for step in steps:
            view, outcome = step.view, step.outcome
            self.proposer_mask |= int(np.bitwise_or.reduce(view.proposer_mask))
            drafted = int(outcome.requested_k.max(initial=0))
            self.k_max = max(self.k_max, drafted, int(view.max_k.max(initial=0)))
            self.bucket_edges.update(view.bucket_edges.tolist())
            self.most_tokens = max(self.most_tokens, outcome.padded_tokens)
            yield step

    def limits(self) -> EngineLimits:
        """Return the limits of an engine that could have written the log."""
        return EngineLimits(
            proposer_mask=self.proposer_mask | 1,
            k_max=max(self.k_max, 1),
            bucket_edges=tuple(sorted(self.bucket_edges)),
            token_budget=max(self.most_tokens, EngineLimits().token_budget),
        )


def judge(name: str, policies: list[Policy], steps: LogReader, cost: StepMs) -> list[Judged]:
    """Return a policy's estimates on a log, over its seeds.

    Raises ValueError where the log itself is of no use.
    """
    replayed = replay(policies, steps, cost)
    model, met = direct_model(replayed)
    found = []
    for estimator in ESTIMATORS:
        try:
            found.append(Judged(name, estimator, estimate(replayed, estimator, model, met)))
        except ValueError as error:
            found.append(Judged(name, estimator, None, " ".join(str(error).split())))
    return found


def _maker(text: str) -> tuple[Callable[[EngineLimits, int], Policy], int]:
    """Return what makes a policy from limits and a seed, and how many seeds it is worth."""
    name, settings = parse_policy(text)
    entry = registry().get(name)
    fields = dataclasses.fields(entry.settings) if entry is not None else ()
    draws = "seed" not in settings and any(f.name == "seed" for f in fields)

    def make(limits: EngineLimits, seed: int) -> Policy:
        values: dict[str, Any] = {**settings, **({"seed": seed} if draws else {})}
        return make_policy(name, values, limits)

    return make, SEEDS if draws else 1


def _show(judged: list[Judged]) -> None:
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    known = [one.estimate for one in judged if one.estimate is not None]
    for one in judged:
        if (found := one.estimate) is not None:
            speeds = (f"{x:,.0f}" for x in (found.goodput, found.low, found.high))
            ratio = f"{found.goodput / found.logged_goodput:.3f}x"
            effective = f"{found.effective_requests:,.0f}"
            table.add_row(one.policy, one.estimator, *speeds, ratio, effective)
    if known:
        typer.echo(
            f"the log's own policy: {known[0].logged_goodput:,.0f} tokens/s over"
            f" {known[0].steps:,} steps, {known[0].requests:,} requests\n"
        )
        console = Console()
        natural = console.measure(table, options=console.options.update(width=10_000)).maximum
        console.width = max(console.width, natural)
        console.print(table)
    for one in judged:
        if one.estimate is None:
            typer.echo(f"{one.policy}, {one.estimator}: refused, {one.refused}")
