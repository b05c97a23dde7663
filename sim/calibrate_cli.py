"""`parlay calibrate trace`: what every proposer would have done on a real model's answers."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from parlay.policies.files import check_writable
from parlay.policies.types import Proposer
from parlay.sim.bar import Bar
from parlay.sim.counterfactual import TracedRequest, write_traces

SEED = 71_003
"""Of the prompts: drafts are not trained on this seed's."""
_DRAWN = 8


def calibrate_trace(
    out: Annotated[Path, typer.Option(help="The file to write, JSON lines.")],
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts, over all tasks.")] = 300,
    tokens: Annotated[int, typer.Option(min=2, max=512, help="Longest answer.")] = 96,
    model: Annotated[
        Path | None, typer.Option(help="A local Hugging Face Llama [default: SmolLM2-135M]")
    ] = None,
) -> None:
    """Record a counterfactual trace that `parlay simulate --acceptance FILE` replays."""
    check_writable(out)
    from parlay.engine.distill.prompts import SHARES, training_prompts
    from parlay.engine.llm import SHIPPED_DRAFT, load_backend
    from parlay.engine.weights import default_model_dir
    from parlay.sim.record import record

    folder = model or default_model_dir()
    draft = None if model else SHIPPED_DRAFT
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(console, *columns, TimeElapsedColumn()) as bar:
        task, scored = bar.add("prompts answered", prompts), bar.add("answers scored")
        # As many of each task, though drafts train on some more than on others.
        drawn = list(training_prompts(prompts * _DRAWN, SEED))
        each = -(-prompts // len(SHARES))
        of_task = [[p for p in drawn if p.task == t][:each] for t in SHARES]
        # In turn, so that requests that run at once in a replay are of every task.
        turns = itertools.zip_longest(*of_task)
        chosen = [p for turn in turns for p in turn if p is not None][:prompts]
        backend, tokenizer = load_backend(model)
        seen = []
        answered = partial(bar.update, task, advance=1)
        for one in record(backend, tokenizer, folder, draft, chosen, tokens, answered):
            seen.append(one)
            bar.update(scored, total=prompts, advance=1)
    write_traces(out, seen)
    console.print(_table(seen))
    console.print(f"{len(seen)} requests in {out}")


def _table(requests: list[TracedRequest]) -> Table:
    """Return the mean accepted tokens by task and proposer, over all positions."""
    table = Table("task", "requests", "tokens", title="accepted tokens, mean over all positions")
    proposers = sorted({p for request in requests for p in request.accepted})
    for proposer in proposers:
        table.add_column(Proposer(proposer).name.lower(), justify="right")
    for task in sorted({request.task for request in requests}):
        mine = [request for request in requests if request.task == task]
        outputs = sum(request.output_tokens for request in mine)
        means = [sum(int(r.accepted[p].sum()) for r in mine) / outputs for p in proposers]
        table.add_row(task, str(len(mine)), str(outputs), *(f"{mean:.2f}" for mean in means))
    return table
