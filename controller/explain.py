"""`parlay explain`: why a request got its plan, from the decisions that the sidecar remembers."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from parlay.controller.fetch import fetch
from parlay.controller.observatory import (
    KEPT_PLANS,
    SPARSE_STEPS,
    Decision,
    EngineSeen,
    Observatory,
    Unknown,
)
from parlay.controller.overview import guard_figures, task_name
from parlay.controller.wording import plain
from parlay.policies.explain import Explanation, Option, explain, words
from parlay.policies.types import Reason

SOME_IDS = 5
"""So many requests are named to whoever asks for one that is not kept."""


def explained(
    observatory: Observatory, request_id: int, engine: str | None = None
) -> dict[str, Any]:
    """Return why a request got its newest plan that is remembered, as plain values.

    Raises Unknown where none is, or where the engine is not known.
    """
    observatory.fold()
    engines = observatory.engines
    if engine is not None and engine not in engines:
        raise Unknown(f"no engine '{engine}' was heard; known: {', '.join(engines) or 'none'}")
    found: list[tuple[str, EngineSeen, Decision]] = []
    for name, seen in engines.items():
        decision = seen.decision_of(request_id) if engine in (None, name) else None
        if decision is not None:
            found.append((name, seen, decision))
    if not found:
        raise Unknown(
            f"request {request_id} is in no decision that is kept: the newest {KEPT_PLANS} steps of"
            f" each engine, and before them {KEPT_PLANS} more, one step in {SPARSE_STEPS}"
            + _kept([seen for name, seen in engines.items() if engine in (None, name)])
        )
    name, seen, decision = max(found, key=lambda item: item[2].at_s)
    why = explain(seen.session.policy, decision.view, decision.plan, request_id)
    newest = seen.newest[-1].view.step_id
    answer: dict[str, Any] = plain(
        why.as_json()
        | {
            "engine": name,
            "task": task_name(why.task),
            "at_s": decision.at_s,
            "steps_ago": max(newest - why.step_id, 0),
            "also_on": [other for other, _, _ in found if other != name],
            "guard": None if seen.guard is None else guard_figures(seen),
            "said": sentence(why),
            "against": _against(why),
        }
    )
    return answer


def _kept(engines: list[EngineSeen]) -> str:
    """Return the newest requests of which a decision is kept, as the end of a sentence."""
    ids: dict[int, None] = {}
    newest = sorted((d for seen in engines for d in seen.newest), key=lambda d: -d.at_s)
    for decision in newest:
        ids |= dict.fromkeys(sorted(map(int, decision.view.request_id), reverse=True))
        if len(ids) >= SOME_IDS:
            break
    some = ", ".join(map(str, list(ids)[:SOME_IDS]))
    return f"; kept are, among others, {some}" if ids else "; none is kept yet"


def sentence(why: Explanation) -> str:
    """Return the answer in a sentence or two."""
    said = f"The plan was to {why.choice}, because {why.because}."
    if why.chosen is None or why.runner_up is None or why.prefill_tokens:
        return said
    other = words(why.runner_up.proposer, why.runner_up.k)
    change = why.runner_up.batch_tokens_per_s / why.chosen.batch_tokens_per_s - 1.0
    if abs(change) < 5e-4:
        return f"{said} To {other} would make no difference."
    if change < 0.0:
        return f"{said} The runner-up, to {other}, would make the batch {-change:.1%} slower."
    return (
        f"{said} By the estimates, to {other} would make the batch {change:.1%} faster{_but(why)}."
    )


def _but(why: Explanation) -> str:
    """Return why what looks faster was not chosen, as far as that is known."""
    if why.by_guard or why.reason is Reason.EXPLORE:
        return ""
    if not why.k:
        return ", which is too little to be sure of"
    return "; step times have been learned anew since"


def _against(why: Explanation) -> list[float | None]:
    """Return each option's batch rate over the chosen one's, less 1."""
    if why.chosen is None:
        return []
    return [o.batch_tokens_per_s / why.chosen.batch_tokens_per_s - 1.0 for o in why.options]


def explain_command(
    request_id: Annotated[int, typer.Argument(help="The request's number in the engine.", min=0)],
    address: Annotated[
        str, typer.Option(help="where the sidecar serves HTTP (parlay serve --http)")
    ] = "http://127.0.0.1:9090",
    engine: Annotated[str | None, typer.Option(help="the engine, where more have it")] = None,
) -> None:
    """Say why a request got its plan: estimates, costs, and the runner-up."""
    query = {} if engine is None else {"engine": engine}
    try:
        found = fetch(address, f"/explain/{request_id}.json", query)
    except (OSError, ValueError) as error:
        typer.echo(f"parlay explain: {error}", err=True)
        raise typer.Exit(1) from None
    Console().print(screen(found))


def screen(found: dict[str, Any]) -> RenderableType:
    """Return an explanation as it is shown in a terminal."""
    head = Text()
    head.append(f"request {found['request_id']}", "bold")
    head.append(f"  engine {found['engine']}  step {found['step_id']}")
    head.append(f" ({found['steps_ago']} steps ago)  policy {found['policy_version']}\n\n")
    head.append(found["said"], "bold")
    parts: list[RenderableType] = [head, Text(), facts(found)]
    if found["survival"]:
        parts += [Text(), Text("chance that the first j drafts all hold", "bold"), _survival(found)]
    if found["options"]:
        parts += [Text(), Text("what it could have drafted", "bold"), _options(found)]
        parts += [Text(rates(found), "dim")]
    parts += [Text(f"note: {note}", "dim") for note in found["notes"]]
    return Group(*parts)


def facts(found: dict[str, Any]) -> Text:
    """Return what the policy knew of the request."""
    parts = [
        f"task {found['task'].removeprefix('task ')}",
        f"{found['context_tokens']:,} tokens of text, {found['output_tokens']:,} of them output",
        f"n-gram match {found['match_tokens']}",
        f"draft model {found['draft_kv_lag']} tokens behind",
        f"at most {found['max_k']} to draft",
        f"temperature {found['temperature']:.2g}",
        f"{found['rows']} requests in the batch",
    ]
    if found["tpot_target_ms"] is not None:
        parts.append(f"target {found['tpot_target_ms']:g} ms a token")
    return Text("; ".join(parts))


def rates(found: dict[str, Any]) -> str:
    """Return the batch's rates and the plan's prices in a line."""
    line = (
        f"whole batch: {found['planned_tokens_per_s']:,.0f} tokens/s as planned,"
        f" {found['plain_tokens_per_s']:,.0f} without speculation"
    )
    if found["token_value_ms"] is None:
        return line
    prices = (f"{p} {ms:.3f}" for p, ms in found["draft_price_ms"].items())
    return (
        f"{line}\nprices in ms: a token is worth {found['token_value_ms']:.3f}, verifying one more"
        f" costs {found['token_price_ms']:.3f}, drafting one {', '.join(prices)}"
    )


def _survival(found: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    longest = max(len(s) for s in found["survival"].values())
    table.add_column("proposer")
    for j in range(1, longest + 1):
        table.add_column(f"j={j}", justify="right")
    for proposer, survival in found["survival"].items():
        table.add_row(proposer, *(f"{s:.0%}" for s in survival))
    return table


def _options(found: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("proposer", "k", "its tokens", "batch ms", "batch tokens/s", "against", ""):
        table.add_column(name, justify="left" if name in ("proposer", "") else "right")
    for option, change in zip(found["options"], found["against"], strict=True):
        mark = mark_of(found, option)
        table.add_row(
            option["proposer"],
            str(option["k"]),
            f"{option['tokens']:.2f}",
            f"{option['step_ms']:.2f}",
            f"{option['batch_tokens_per_s']:,.0f}",
            f"{change:+.1%}" if mark != "chosen" else "",
            mark,
            style="bold" if mark == "chosen" else None,
        )
    return table


def mark_of(found: dict[str, Any], option: Option | dict[str, Any]) -> str:
    """Return whether an option is the chosen one or the runner-up."""
    if option == found["chosen"]:
        return "chosen"
    return "runner-up" if option == found["runner_up"] else ""
