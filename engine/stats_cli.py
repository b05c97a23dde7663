"""`parlay stats`: an engine's steps as they happen, or one request's figures."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Annotated, Any

import typer

from parlay.engine.cli import one_line
from parlay.engine.stats_client import Seen, ask, watch
from parlay.policies.types import (
    NO_BUDGET,
    BatchView,
    Plan,
    PlanSource,
    Proposer,
    StepOutcome,
    Truncated,
)

LIVE_MS = 250
FIRST_S = 3.0
"""So long is a step waited for where one is to be shown."""
HEAD_LINES = 8
NOT_SHOWN = ("task", "verified_k", "truncated_by")


def stats(
    address: Annotated[
        str, typer.Argument(help="where the engine serves its stats: unix:/path or host:port")
    ],
    request: Annotated[int | None, typer.Option(help="show this request's figures only")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, a line a step")] = False,
    follow: Annotated[
        bool | None,
        typer.Option("--watch/--once", help="go on, or show one step [default: a terminal's]"),
    ] = None,
    interval_ms: Annotated[
        int | None,
        typer.Option(min=0, help="time between two steps shown [default: 250, with --json 0]"),
    ] = None,
) -> None:
    """Show what an engine does, step by step and by request; Ctrl-C ends.

    Where the output is no terminal, one step is shown.
    """
    from rich.console import Console

    console = Console()
    follow = console.is_terminal if follow is None else follow
    every_ms = interval_ms if interval_ms is not None else (0 if as_json else LIVE_MS)
    with one_line("stats"), contextlib.suppress(KeyboardInterrupt):
        if request is not None:
            _show_request(ask(address, request), as_json)
        elif not follow or as_json:
            _print_steps(address, every_ms, follow, as_json, console)
        else:
            _live(address, every_ms, console)


def _print_steps(address: str, every_ms: int, follow: bool, as_json: bool, console: Any) -> None:
    """Print steps one after the other, or the first only."""
    for seen in watch(address, every_ms, None if follow else FIRST_S):
        typer.echo(json.dumps(as_dict(seen))) if as_json else console.print(screen(seen))
        if not follow:
            break


def _live(address: str, every_ms: int, console: Any) -> None:
    """Show the newest step in place until told to stop."""
    from rich.live import Live

    before: Seen | None = None
    last_s = time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for seen in watch(address, every_ms):
            now_s, rate = time.monotonic(), None
            if before is not None:
                tokens = seen.counters["emitted_tokens"] - before.counters["emitted_tokens"]
                rate = tokens / max(now_s - last_s, 1e-9)
            live.update(screen(seen, rate, console.height - HEAD_LINES), refresh=True)
            before, last_s = seen, now_s
    if before is not None:
        console.print(screen(before), "\nthe engine has ended")


def _show_request(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures))
        return
    proposers = figures.pop("proposers")
    for name, value in figures.items():
        text = "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
        typer.echo(f"{name:<15} {text}")
    for by in proposers:
        typer.echo(
            f"{by['proposer']:<15} {by['steps']} steps, {by['accepted_tokens']} of"
            f" {by['drafted_tokens']} drafted tokens accepted ({by['verified_tokens']} verified)"
        )


def as_dict(seen: Seen) -> dict[str, Any]:
    """Return a step as JSON can hold it, a dictionary a request; nan is None."""
    view, outcome, plan = seen.view, seen.outcome, seen.plan
    return {
        "engine_id": seen.engine_id,
        "step_id": outcome.step_id,
        "step_ms": outcome.step_ms,
        "verify_ms": outcome.verify_ms,
        "draft_ms": {p.name.lower(): float(outcome.draft_ms[p]) for p in Proposer if p},
        "padded_tokens": outcome.padded_tokens,
        "prefill_tokens": outcome.prefill_tokens,
        "running": view.running,
        "waiting": view.waiting,
        "free_blocks": view.free_blocks,
        "total_blocks": view.total_blocks,
        "plan": None if plan is None else _plan(plan),
        "requests": rows(view, outcome),
        "counters": seen.counters,
        "lost_steps": seen.lost_steps,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "step_id": plan.step_id,
        "policy_version": plan.policy_version,
        "state_version": plan.state_version,
        "token_value_ms": plan.token_value_ms if math.isfinite(plan.token_value_ms) else None,
        "budget_tokens": None if plan.budget_tokens == NO_BUDGET else plan.budget_tokens,
    }


def rows(view: BatchView, outcome: StepOutcome) -> list[dict[str, Any]]:
    """Return each request of a step: what it was before, who drafted, what became of it."""
    return [
        {
            "request_id": int(outcome.request_id[i]),
            "task": int(outcome.task[i]),
            "context_tokens": int(view.context_tokens[i]),
            "output_tokens": int(view.output_tokens[i]),
            "proposer": Proposer(outcome.proposer[i]).name.lower(),
            "requested_k": int(outcome.requested_k[i]),
            "drafted_k": int(outcome.drafted_k[i]),
            "verified_k": int(outcome.verified_k[i]),
            "accepted": int(outcome.accepted[i]),
            "emitted": int(outcome.emitted[i]),
            "match_tokens": int(outcome.match_tokens[i]),
            "plan_source": PlanSource(outcome.plan_source[i]).name.lower(),
            "truncated_by": Truncated(outcome.truncated_by[i]).name.lower(),
        }
        for i in range(len(outcome))
    ]


def screen(seen: Seen, tokens_per_s: float | None = None, most_rows: int | None = None) -> Any:
    """Return a step as it is shown in a terminal; tokens_per_s None: of this step alone."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    view, outcome, counters = seen.view, seen.outcome, seen.counters
    if tokens_per_s is None:
        tokens_per_s = 1e3 * float(outcome.emitted.sum()) / max(outcome.step_ms, 1e-9)
    drafted, accepted = counters["drafted_tokens"], counters["accepted_tokens"]
    head = Text()
    head.append(f"{seen.engine_id}", "bold")
    head.append(f"  step {outcome.step_id}  {outcome.step_ms:.2f} ms")
    head.append(f" (verify {outcome.verify_ms:.2f}, draft {outcome.draft_ms.sum():.2f})\n")
    head.append(f"{tokens_per_s:.1f} tokens/s", "bold green")
    head.append(f"  {view.running} running, {view.waiting} waiting")
    head.append(f"  blocks {view.total_blocks - view.free_blocks}/{view.total_blocks}")
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    head.append(f"  accepted {accepted} of {drafted} drafted{share}\n")
    head.append(
        f"plans: {counters['plans_remote']} remote, {counters['plans_local']} local"
        f"  finished {counters['finished_requests']}  preempted {counters['preemptions']}"
    )
    if seen.lost_steps:
        head.append(f"  {seen.lost_steps} steps lost", "yellow")
    table, found = Table(box=None, pad_edge=False, header_style="bold"), rows(view, outcome)
    shown = [name for name in found[0] if name not in NOT_SHOWN]
    for name in shown:
        words = isinstance(found[0][name], str)
        table.add_column(name.split("_")[0], justify="left" if words else "right", no_wrap=True)
    for row in found[:most_rows]:
        table.add_row(*(str(row[name]) for name in shown))
    parts: list[Any] = [head, Text(), table]
    if most_rows is not None and len(found) > most_rows:
        parts.append(Text(f"and {len(found) - most_rows} more", "dim"))
    return Group(*parts)
