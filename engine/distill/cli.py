"""`parlay distill draft`: from a target to a measured draft file, each stage resumable."""

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


def distill_draft(
    out: Annotated[
        Path | None, typer.Option(help="the draft's file; with --measure-only: the shipped one")
    ] = None,
    work: Work = WORK,
    minutes: Minutes = 60.0,
    seed: Seed = 1,
    prompts: Prompts = 8000,
    model: Target = None,
    measure_only: MeasureOnly = False,
    json_file: JsonFile = None,
) -> None:
    """Train a draft model on what the target generates, and measure it by task."""
    with one_line("distill draft"):
        check(out, measure_only, minutes, prompts, "draft goes")
        from rich.console import Console

        from parlay.engine.distill.pipeline import Settings, make, measure
        from parlay.engine.llm import SHIPPED_DRAFT

        settings = Settings(work, seed, prompts, minutes, model)
        stage = measure if measure_only else make
        write_figures(json_file, stage(settings, out or SHIPPED_DRAFT, Console(stderr=True)))
