"""`parlay distill medusa`: from a target to measured Medusa heads, each stage resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parlay.engine.cli import JsonFile, one_line
from parlay.engine.distill.options import (
    WORK,
    MeasureOnly,
    Minutes,
    Prompts,
    Seed,
    Target,
    Work,
    check,
    write_figures,
)


def distill_medusa(
    out: Annotated[
        Path | None,
        typer.Option(help="the heads' file; with --measure-only: the shipped one, or a folder"),
    ] = None,
    work: Work = WORK,
    minutes: Minutes = 60.0,
    seed: Seed = 1,
    prompts: Prompts = 8000,
    model: Target = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="a draft's file to start from; none: the default model's, else random"),
    ] = None,
    measure_only: MeasureOnly = False,
    json_file: JsonFile = None,
) -> None:
    """Train Medusa heads on what the target generates, and measure them by task.

    What the target answered for `distill draft` in the same folder is not asked again.
    """
    with one_line("distill medusa"):
        check(out, measure_only, minutes, prompts, "heads go")
        from rich.console import Console

        from parlay.engine.distill.medusa import make_heads, measure_heads
        from parlay.engine.distill.pipeline import Settings
        from parlay.engine.llm import SHIPPED_DRAFT
        from parlay.engine.medusa_format import SHIPPED_HEADS

        settings = Settings(work, seed, prompts, minutes, model)
        console, path = Console(stderr=True), out or SHIPPED_HEADS
        if measure_only:
            figures = measure_heads(settings, path, console)
        else:
            start = draft or (SHIPPED_DRAFT if model is None else None)
            figures = make_heads(settings, path, console, start)
        write_figures(json_file, figures)
