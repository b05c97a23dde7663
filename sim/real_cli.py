"""`parlay calibrate check`: what the simulator foretells beside what this machine's engine does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from parlay.policies.files import check_writable, write_json
from parlay.policies.policy import EngineLimits, Policy, make_policy
from parlay.sim.real import (
    Agreement,
    Ask,
    Compared,
    MakePolicy,
    Player,
    agreement,
    learn_costs,
    simulated,
    timed,
    waves,
)
from parlay.sim.simulate import parse_policy

POLICIES = (
    "none,fixed:proposer=draft_model/k=1,fixed:proposer=draft_model/k=4,"
    "fixed:proposer=ngram/k=4,ngram_gate,pilot"
)
SEED = 71_004
"""Of the prompts: drafts are not trained on this seed's."""
TARGET_TAU, TARGET_ERROR = 0.8, 0.1
_DRAWN = 8


def calibrate_check(
    policy: Annotated[str, typer.Option(help="Names with commas; gains are over the first.")] = (
        POLICIES
    ),
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, over all tasks.")] = 24,
    tokens: Annotated[int, typer.Option(min=8, max=512, help="Longest answer.")] = 96,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each policy is measured.")] = 3,
    model: Annotated[
        Path | None, typer.Option(help="A local Hugging Face Llama [default: SmolLM2-135M]")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table here.")] = None,
) -> None:
    """Foretell what policies gain, measure it on the engine, and print both.

    Costs are learned from one run of the engine, acceptance from a recording of the same requests.
    """
    makers = {text: _maker(text) for text in policy.split(",") if text}
    if len(makers) < 2:
        raise ValueError("name at least two policies: gains are over the first")
    if json_path is not None:
        check_writable(json_path)
    rows = _compared(makers, prompts, tokens, concurrency, rounds, model)
    found = agreement(rows, rounds)
    Console().print(_table(rows, found))
    if json_path is not None:
        write_json(
            json_path,
            {
                "rows": [dataclasses.asdict(row) for row in rows],
                **dataclasses.asdict(found),
                "concurrency": concurrency,
            },
        )


def _compared(
    makers: dict[str, MakePolicy],
    prompts: int,
    tokens: int,
    concurrency: int,
    rounds: int,
    model: Path | None,
) -> list[Compared]:
    from parlay.engine.distill.prompts import SHARES, training_prompts
    from parlay.engine.llm import SHIPPED_DRAFT, load_backend
    from parlay.engine.weights import default_model_dir
    from parlay.sim.record import LONGEST_PROMPT, record

    backend, tokenizer = load_backend(model)
    drawn = list(training_prompts(prompts * _DRAWN, SEED))
    ids = {p.text: tokenizer.chat([{"role": "user", "content": p.text}]) for p in drawn}
    drawn = [p for p in drawn if len(ids[p.text]) <= LONGEST_PROMPT]
    of_task = [[p for p in drawn if p.task == task] for task in SHARES]
    chosen = [p for some in zip(*of_task, strict=False) for p in some][:prompts]
    folder, draft = model or default_model_dir(), None if model else SHIPPED_DRAFT
    typer.echo(f"recording what every proposer would do on {len(chosen)} answers", err=True)
    recorded = list(record(backend, tokenizer, folder, draft, chosen, tokens, lambda: None))
    asks = [
        Ask(ids[p.text], p.task, r.output_tokens) for p, r in zip(chosen, recorded, strict=True)
    ]
    config, parts = backend.config, waves(asks, concurrency)
    if not parts:
        raise ValueError(f"{len(asks)} prompts fill no wave of {concurrency}: give more")
    # The first run of all is the slowest, and is nobody's.
    Player(backend, next(iter(makers.values())), config).play(parts[0])
    typer.echo("learning step times from a run of the engine", err=True)
    costs = learn_costs(backend, config, parts)
    whole = recorded[: len(parts) * concurrency]
    rows = []
    for name, make in makers.items():
        like = simulated(costs, whole, backend.limits())
        stand_in = Player(like, timed(make, like), config)
        rows.append(Compared(name, [stand_in.play(p) for _ in range(rounds) for p in parts], []))
    players = [Player(backend, make, config) for make in makers.values()]
    for turn in range(rounds):
        typer.echo(f"round {turn + 1} of {rounds}", err=True)
        for part in parts:
            for row, player in zip(rows, players, strict=True):
                row.measured.append(player.play(part))
    return rows


def _maker(text: str) -> MakePolicy:
    name, settings = parse_policy(text)
    make_policy(name, settings)

    def make(limits: EngineLimits) -> Policy:
        return make_policy(name, settings, limits)

    return make


def _repeated(found: Agreement) -> str:
    """Return how rounds of measuring agree among themselves, "" of one."""
    if found.repeat_tau is None:
        return ""
    return (
        f"\nmeasured once and again: tau {found.repeat_tau:.2f},"
        f" largest difference {found.repeat_error:.0%}"
    )


def _table(rows: list[Compared], found: Agreement) -> Table:
    worst = max(abs(error) for error in found.errors)
    table = Table(
        title=f"gains over {rows[0].policy}: foretold by the simulator, measured on the engine",
        caption=f"Kendall tau {found.tau:.2f} (wanted: {TARGET_TAU}), largest error of a gain"
        f" {worst:.0%} (wanted: {TARGET_ERROR:.0%}){_repeated(found)}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for name in ("tokens/s", "measured", "gain", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    gains = [(1.0, 1.0, 0.0), *zip(found.foretold, found.measured, found.errors, strict=True)]
    for row, (foretold, measured, error) in zip(rows, gains, strict=True):
        speeds = [f"{np.median(of):.1f}" for of in (row.foretold, row.measured)]
        table.add_row(row.policy, *speeds, f"{foretold:.2f}", f"{measured:.2f}", f"{error:+.0%}")
    return table
