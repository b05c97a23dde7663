"""What the demo found: the JSON report and the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import add
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from parlay.engine.demo import stats
from parlay.engine.demo.prompts import TASKS
from parlay.engine.demo.run import DemoRun
from parlay.engine.demo.stats import ADAPTIVE, NONE
from parlay.engine.demo.steps import StepLog
from parlay.engine.demo.workload import CONCURRENCIES, MIXED
from parlay.policies.types import PlanSource, Proposer

Json = dict[str, Any]
SPREAD = 0.15
"""Rounds of one mode that differ by more were disturbed."""
STEP_FALL = 0.05
"""A bigger batch's step does not take less time than a smaller one's, but for this much."""


def report_of(run: DemoRun, policy: str, verdict: Json) -> Json:
    """Return the whole report; `verdict` is soundness.judge's."""
    cells = range(len(run.cells))
    mixed = [c for c in cells if run.cells[c].mixed]
    tasks = [c for c in cells if not run.cells[c].mixed]
    modes = list(run.rounds[0])
    statics = [m for m in modes if m != ADAPTIVE]
    best = stats.best_static(run.rounds, statics, mixed)
    worst, ratio = stats.worst_cell(run.rounds, cells)
    return {
        "modes": {m: _mode(run, m, mixed) for m in modes},
        "adaptive": ADAPTIVE,
        "policy": policy,
        "best_static": best.name,
        "best_static_measured": {
            "over": "mixed phases, measuring half",
            "ratio_to_none": best.ratio_to_none,
            "adaptive_ratio_to_none": best.adaptive_ratio_to_none,
        },
        "per_cell_best": _per_cell(run, stats.per_cell_best(run.rounds, statics, tasks), tasks),
        "min_cell_ratio": ratio,
        "min_cell": run.cells[worst].label,
        **verdict,
        "run": _conditions(run),
    }


def log_of(run: DemoRun, mode: str) -> StepLog:
    """Return a mode's steps over everything, in the order they ran."""
    return reduce(add, (done.steps for r in run.rounds for done in r[mode]))


def _mode(run: DemoRun, mode: str, mixed: Sequence[int]) -> Json:
    log, rounds = log_of(run, mode), run.rounds
    rates = [stats.speed([r], mode, mixed) for r in rounds]
    ratios = stats.paired_ratios(rounds, mode, mixed)
    k = log.mean_k_by_task
    rows = max(int(log.sources.sum()), 1)
    return {
        "tokens_per_s": median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "ratio_to_none": median(ratios),
        "ratios_by_round": ratios,
        "mean_acceptance_length": log.mean_acceptance_length,
        "share_by_proposer": _share(log),
        "mean_k_by_task": {t: float(k[i]) for i, t in enumerate(TASKS) if not math.isnan(k[i])},
        "plans_by_source": {s.name.lower(): int(log.sources[s]) / rows for s in PlanSource},
        "per_cell": {
            cell.label: {
                "tokens_per_s": stats.speed(rounds, mode, [c]),
                "ratio_to_none": stats.median_ratio(rounds, mode, [c]),
                "mean_acceptance_length": _cell_log(run, mode, c).mean_acceptance_length,
                "share_by_proposer": _share(_cell_log(run, mode, c)),
            }
            for c, cell in enumerate(run.cells)
        },
    }


def _share(log: StepLog) -> Json:
    share = log.share_by_proposer
    return {p.name.lower(): float(share[p]) for p in Proposer if share[p] > 0}


def _cell_log(run: DemoRun, mode: str, cell: int) -> StepLog:
    return reduce(add, (r[mode][cell].steps for r in run.rounds))


def _per_cell(run: DemoRun, found: stats.Headroom, tasks: Sequence[int]) -> Json:
    return {
        "over": "cells of one task, measuring half",
        "ratio_to_none": found.ratio_to_none,
        "best_static": found.best_static.name,
        "best_static_ratio_to_none": found.best_static.ratio_to_none,
        "adaptive_ratio_to_none": found.best_static.adaptive_ratio_to_none,
        "headroom": found.headroom,
        "headroom_closed": found.closed,
        "picks": {run.cells[c].label: m for c, m in zip(tasks, found.picks, strict=True)},
    }


def _conditions(run: DemoRun) -> Json:
    return {
        "kind": run.plan.name,
        "rounds": len(run.rounds),
        "stopped_early": run.stopped_early,
        "output_tokens": run.shape.output_tokens,
        "task_requests": {str(c): n for c, n in run.shape.task_requests.items()},
        "mixed_requests": {str(c): n for c, n in run.shape.mixed_requests.items()},
        "plain_step_ms": {str(c): ms for c, ms in run.costs.step_ms.items()},
        "prompt_token_ms": run.costs.prompt_token_ms,
    }


def print_report(report: Json, console: Console) -> None:
    """Print the tables and the findings in words."""
    for table in (_modes_table(report), _k_table(report), _cells_table(report)):
        console.print(table)
    for line in findings(report):
        console.print(line, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def _modes_table(report: Json) -> Table:
    proposers = [Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL]
    shares = [f"{p.name.lower().partition('_')[0]}%" for p in proposers]
    table = _table(
        "speed: all tasks mixed, at 1, 4 and 16 at once; tokens a step and shares: everything",
        *("mode", "tok/s", "min-max", "x none", "tok/step", *shares),
    )
    for name, m in report["modes"].items():
        shared = [100 * m["share_by_proposer"].get(p.name.lower(), 0.0) for p in proposers]
        table.add_row(
            name,
            f"{m['tokens_per_s']:.1f}",
            f"{m['tokens_per_s_min']:.0f}-{m['tokens_per_s_max']:.0f}",
            f"{m['ratio_to_none']:.2f}",
            f"{m['mean_acceptance_length']:.2f}",
            *(f"{s:.0f}" for s in shared),
        )
    return table


def _k_table(report: Json) -> Table:
    table = _table("mean k by task: tokens verified a request and step", "mode", *TASKS)
    for name, m in report["modes"].items():
        if name != NONE:
            k = m["mean_k_by_task"]
            table.add_row(name, *(f"{k[t]:.1f}" if t in k else "" for t in TASKS))
    return table


def _cells_table(report: Json) -> Table:
    best, modes = report["best_static"], report["modes"]
    table = _table(
        f"x none by task and concurrency: {best} (best static) / adaptive",
        *("task", *(f"{c} at once" for c in CONCURRENCIES)),
    )
    for task in (*TASKS, MIXED):
        labels = [f"{task}@{c}" for c in CONCURRENCIES]
        ratios = [
            [modes[m]["per_cell"][label]["ratio_to_none"] for m in (best, ADAPTIVE)]
            for label in labels
        ]
        table.add_row(task, *(f"{a:.2f} / {b:.2f}" for a, b in ratios))
    return table


def findings(report: Json) -> list[str]:
    """Return what the tables say, a line each."""
    best, cell, run = report["best_static_measured"], report["per_cell_best"], report["run"]
    ours = report["modes"][ADAPTIVE]["ratio_to_none"]
    chosen = "chosen and measured on the same round"
    if run["rounds"] > 1:
        chosen = "chosen on one half of the rounds, measured on the other"
    lines = [
        f"adaptive ({report['policy']} in a sidecar): {ours:.2f}x no speculation, all tasks mixed",
        f"best single setting there: {report['best_static']} {best['ratio_to_none']:.2f}x, "
        f"adaptive beside it {best['adaptive_ratio_to_none']:.2f}x ({chosen})",
        "one task at a time, as if somebody tuned each task and load by hand: "
        f"{cell['ratio_to_none']:.2f}x; one setting for all, {cell['best_static']}: "
        f"{cell['best_static_ratio_to_none']:.2f}x; adaptive: {cell['adaptive_ratio_to_none']:.2f}x"
        f", {_closed(cell)}",
        f"where adaptive does worst: {report['min_cell']}, {report['min_cell_ratio']:.2f}x",
        _agreement(report),
        "modes: ngram-K and draft-K always draft K tokens (`fixed`), gate is `ngram_gate`",
    ]
    if disturbed := disturbance(report):
        lines.append(f"the machine was busy, so these figures are rough: {disturbed}")
    if run["rounds"] == 1:
        lines.append("only one round was complete: choices were made and measured on the same one")
    elif run["stopped_early"]:
        lines.append(
            f"time ran out: {run['rounds']} rounds are complete and count, the rest does not"
        )
    return lines


def disturbance(report: Json) -> str | None:
    """Say what shows that other processes took time from the demo's; None: nothing does."""
    steps = sorted((int(c), ms) for c, ms in report["run"]["plain_step_ms"].items())
    found = []
    if any(b < (1 - STEP_FALL) * a for (_, a), (_, b) in pairwise(steps)):
        times = ", ".join(f"{ms:.0f} ms at {c}" for c, ms in steps)
        found.append(f"a plain step took {times}, and should take longer with more at once")
    # Adaptive learns from round to round: only the others should do the same in each.
    spreads = {
        name: m["tokens_per_s_max"] / m["tokens_per_s_min"] - 1
        for name, m in report["modes"].items()
        if name != ADAPTIVE
    }
    widest = max(spreads, key=lambda name: spreads[name])
    if spreads[widest] > SPREAD:
        found.append(f"one round of {widest} was {100 * spreads[widest]:.0f}% faster than another")
    return "; ".join(found) or None


def _closed(cell: Json) -> str:
    closed, headroom = cell["headroom_closed"], f"{100 * cell['headroom']:.1f}%"
    if closed is None:
        if cell["headroom"] <= 0:
            return "where tuning by hand won nothing over one setting for all"
        return f"where tuning by hand won only {headroom} over one setting for all"
    if closed >= 1:
        return "more than tuning by hand won"
    if closed <= 0:
        return f"none of the {headroom} that tuning by hand won over one setting for all"
    return f"{100 * closed:.0f}% of the {headroom} that tuning by hand won over one setting for all"


def _agreement(report: Json) -> str:
    compared, divergent = report["outputs_compared"], report["divergent_outputs"]
    if not divergent:
        return f"outputs: all {compared} agree with no speculation's, token for token"
    rate, unsound = report["rate"], len(report["unsound"])
    verdict = "each at a near-tie" if not unsound else f"{unsound} of them NOT at a near-tie"
    text = (
        f"outputs: {divergent} of {compared} leave no speculation's text somewhere, {verdict} "
        f"(within {report['logit_noise']:.2f}, bf16's noise, of the best logit in float32); "
        f"that is {100 * rate['speculating']:.0f}% of a prompt's outputs, and plain decoding in "
        f"batches of other sizes leaves it in {100 * rate['plain_at_other_row_counts']:.0f}%"
    )
    return text + ("; MORE often than plain decoding does" if rate["higher"] else "")
