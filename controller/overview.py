"""The observatory's sums as plain figures: one dict that the page, `parlay top` and JSON share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlay.controller.history import series
from parlay.controller.observatory import (
    Decision,
    EngineSeen,
    Observatory,
    Unknown,
)
from parlay.controller.tally import (
    POSITIONS,
    TASK_ACCEPTED,
    TASK_DRAFTED,
    TASK_EMITTED,
    TASK_ROWS,
    Tally,
    calibration_error,
)
from parlay.controller.wording import plain
from parlay.policies.explain import BECAUSE, because, by_guard, name_of
from parlay.policies.types import PROPOSERS, Array, PlanSource, Reason, task_id

SILENT_S = 10.0
"""An engine that was not heard for so long counts in no sum of what happens now."""
_LEAST_PLACES = 20.0
"""Fewer verified positions than this say nothing worth showing."""
_DECISIONS = 16
_TAGS = ("chat", "code", "continue", "edit", "extract", "hostile", "math", "qa", "rag")
_MORE_TAGS = ("reasoning", "summarise", "summarize", "translate")
_TASK_NAMES = {0: "unknown"} | {task_id(tag): tag for tag in (*_TAGS, *_MORE_TAGS)}
NAMES = [name_of(p) for p in range(PROPOSERS)]


def task_name(task: int) -> str:
    """Return the usual tag with this hash (tags themselves are not sent), else the hash."""
    return _TASK_NAMES.get(task, f"task {task:08x}")


def overview(observatory: Observatory, engine: str | None = None) -> dict[str, Any]:
    """Return what there is to see, of one engine or of all; None stands for what is not known.

    Shares and accepted are in [0, 1], times in s or ms as named; tokens_per_s is goodput: emitted
    tokens per second of step time, summed over engines. "Now" is an average that weighs the last
    half minute most. Raises Unknown where there is no such engine.
    """
    observatory.fold()
    engines, now_s = observatory.engines, observatory.clock()
    if engine is not None and engine not in engines:
        raise Unknown(f"no engine '{engine}' was heard; known: {', '.join(engines) or 'none'}")
    chosen = {e: seen for e, seen in engines.items() if engine in (None, e)}
    live = {
        e: seen
        for e, seen in chosen.items()
        if now_s - seen.heard_s <= SILENT_S and not seen.session.ended
    }
    recent = Tally()
    for seen in live.values():
        recent.add(seen.recent)
    rows = [engine_figures(e, seen, now_s) for e, seen in engines.items()]
    figures = {
        "now_s": now_s,
        "uptime_s": now_s - observatory.started_s,
        "engine": engine,
        "totals": _totals([row for row in rows if row["engine"] in live], recent),
        "engines": rows,
        "proposers": _proposers(recent),
        "tasks": _tasks(recent),
        "history": series([seen.history for seen in chosen.values()], now_s, observatory.started_s),
        "decisions": _decisions(live or chosen),
    }
    found: dict[str, Any] = plain(figures)
    return found


def engine_figures(engine: str, seen: EngineSeen, now_s: float) -> dict[str, Any]:
    """Return one engine's figures of now."""
    recent, session = seen.recent, seen.session
    newest = seen.newest[-1] if seen.newest else None
    view = newest.view if newest else None
    report = seen.guard.report() if seen.guard is not None else None
    return {
        "engine": engine,
        "policy": session.policy.name,
        "connected": session.stream > 0,
        "ended": session.ended,
        "heard_ago_s": now_s - seen.heard_s,
        "running": view.running if view else 0,
        "waiting": view.waiting if view else 0,
        "free_blocks": view.free_blocks if view else 0,
        "total_blocks": view.total_blocks if view else 0,
        "tokens_per_s": _ratio(1e3 * _sum(recent.emitted), _sum(recent.step_ms)),
        "step_ms": _ratio(_sum(recent.step_ms), _sum(recent.steps)),
        "tokens_per_row": _ratio(_sum(recent.emitted), _sum(recent.rows)),
        "expected_gain": mean_gain(seen),
        "guard": None if report is None else guard_figures(seen),
        "shares": _shares(recent.rows),
        "mean_k": _ratio(_sum(recent.planned_k), _sum(recent.decisions)),
        "fallback_share": _fallbacks(recent),
        "plan_age_steps": _ratio(_sum(recent.age_steps), _sum(recent.ages)),
        "state_version": newest.plan.state_version if newest else 0,
        "steps": int(_sum(seen.total.steps)),
        "decisions": int(_sum(seen.total.decide_s)),
    }


def mean_gain(seen: EngineSeen) -> float:
    """Return the mean expected gain of the newest decisions, nan where the policy says none."""
    gains = [d.gain for d in seen.newest if math.isfinite(d.gain)]
    return sum(gains) / len(gains) if gains else math.nan


def guard_figures(seen: EngineSeen) -> dict[str, Any]:
    """Return where the engine's guard stands; its gain is None before the first pair."""
    assert seen.guard is not None
    report = seen.guard.report()
    return {
        "on": report.on,
        "gain": report.gain,
        "lower": report.lower,
        "upper": report.upper,
        "loss_s": report.loss_s,
        "probing_share": report.probing_share,
        "switches": report.switches,
        "probes": report.probes,
    }


def _totals(rows: list[dict[str, Any]], recent: Tally) -> dict[str, Any]:
    rates = [(row["tokens_per_s"], row["expected_gain"]) for row in rows]
    rates = [(rate, gain) for rate, gain in rates if rate is not None]
    plain = sum(rate / (gain if gain == gain else 1.0) for rate, gain in rates)
    total = sum(rate for rate, _ in rates)
    guards = [row["guard"] for row in rows if row["guard"] is not None]
    measured = [guard for guard in guards if math.isfinite(guard["gain"])]
    return {
        "engines": len(rows),
        "running": sum(row["running"] for row in rows),
        "waiting": sum(row["waiting"] for row in rows),
        "tokens_per_s": total if rates else None,
        "plain_tokens_per_s": plain if rates and any(g == g for _, g in rates) else None,
        "expected_gain": _ratio(total, plain) if any(g == g for _, g in rates) else None,
        "guards": len(guards),
        "guards_on": sum(guard["on"] for guard in guards),
        "guard_gain": _mean([guard["gain"] for guard in measured]),
        "guard_lower": measured[0]["lower"] if len(measured) == 1 else None,
        "guard_upper": measured[0]["upper"] if len(measured) == 1 else None,
        "mean_k": _ratio(_sum(recent.planned_k), _sum(recent.decisions)),
        "drafting_share": _ratio(_sum(recent.rows[1:]), _sum(recent.rows)),
        "tokens_per_row": _ratio(_sum(recent.emitted), _sum(recent.rows)),
        "fallback_share": _fallbacks(recent),
        "plan_age_steps": _ratio(_sum(recent.age_steps), _sum(recent.ages)),
        "decide_ms": _ratio(1e3 * _sum(recent.decide_sum_s), _sum(recent.decide_s)),
    }


def _proposers(recent: Tally) -> list[dict[str, Any]]:
    """Return each proposer that ran: its share of rows, k, and acceptance by position."""
    error, found = calibration_error(recent.bins), []
    for p in range(1, PROPOSERS):
        reached, held = recent.reached[p], recent.held[p]
        if reached[0] < 1.0:
            continue
        shown = [p for p in range(POSITIONS) if reached[p] >= _LEAST_PLACES]
        drafted = sum(float(sums[TASK_DRAFTED, p]) for sums in recent.tasks.values())
        found.append(
            {
                "proposer": NAMES[p],
                "share": _ratio(float(recent.rows[p]), _sum(recent.rows)),
                "mean_k": _ratio(drafted, float(recent.rows[p])),
                "accepted": _ratio(_sum(held), drafted),
                "by_position": [_ratio(float(held[j]), float(reached[j])) for j in shown],
                "calibration_error": float(error[p]),
            }
        )
    return found


def _tasks(recent: Tally) -> list[dict[str, Any]]:
    """Return each task, the largest first: k by proposer, shares, tokens a row and step."""
    found = []
    for task, sums in recent.tasks.items():
        rows = sums[TASK_ROWS]
        if float(rows.sum()) < 1.0:
            continue
        found.append(
            {
                "task": task_name(task),
                "rows": float(rows.sum()),
                "shares": _shares(rows),
                "mean_k": _ratio(_sum(sums[TASK_DRAFTED]), _sum(rows)),
                "k": {
                    NAMES[p]: _ratio(float(sums[TASK_DRAFTED, p]), float(rows[p]))
                    for p in range(1, PROPOSERS)
                },
                "accepted": _ratio(_sum(sums[TASK_ACCEPTED]), _sum(sums[TASK_DRAFTED])),
                "tokens_per_row": _ratio(_sum(sums[TASK_EMITTED]), _sum(rows)),
            }
        )
    return sorted(found, key=lambda task: -task["rows"])


def _decisions(engines: dict[str, EngineSeen]) -> list[dict[str, Any]]:
    """Return rows of the engines' newest decisions, spread evenly over each batch."""
    found: list[dict[str, Any]] = []
    each = max(_DECISIONS // max(len(engines), 1), 1)
    for engine, seen in list(engines.items())[:_DECISIONS]:
        if seen.newest:
            decision = seen.newest[-1]
            count = len(decision.plan)
            places = np.linspace(0, count - 1, min(each, count)).round().astype(int).tolist()
            guards = by_guard(seen.session.policy, decision.plan)
            found += [decision_figures(engine, decision, place, guards) for place in places]
    return found


def decision_figures(engine: str, decision: Decision, place: int, guards: bool) -> dict[str, Any]:
    """Return one row of a decision; guards: a guard made the plan in its policy's place.

    tokens: expected in the step, the bonus token counted. worth_ms: of those drafted; cost_ms: of
    drafting and verifying them, the draft model's shared passes left out; None without prices.
    """
    view, plan = decision.view, decision.plan
    k = int(plan.k[place])
    proposer = int(plan.proposer[place]) if k else 0
    prompt = place < len(view) and bool(view.prefill_tokens[place] > 0)
    drafted = math.nan
    if plan.survival is not None and not prompt:
        drafted = float(plan.survival[place, proposer, :k].sum())
    cost_ms = k * (plan.marginal_token_price_ms + float(plan.draft_token_price_ms[proposer]))
    reason = int(plan.reason[place])
    why = ""
    if reason in BECAUSE:
        max_k = int(view.max_k[place]) if place < len(view) else k
        why = because(Reason(reason), prompt, max_k, guards)
    return {
        "engine": engine,
        "step": plan.step_id,
        "request_id": int(plan.request_id[place]),
        "task": task_name(int(view.task[place])) if place < len(view) else "",
        "proposer": NAMES[proposer],
        "k": k,
        "tokens": 1.0 + drafted,
        "worth_ms": drafted * plan.token_value_ms if k else math.nan,
        "cost_ms": cost_ms if k else math.nan,
        "why": why,
    }


def _shares(rows: Array) -> dict[str, Any]:
    return {NAMES[p]: _ratio(float(rows[p]), _sum(rows)) for p in range(PROPOSERS)}


def _fallbacks(recent: Tally) -> float | None:
    return _ratio(
        _sum(recent.sources) - float(recent.sources[PlanSource.REMOTE]), _sum(recent.sources)
    )


def _sum(array: Array) -> float:
    return float(array.sum())


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0.0 else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
