"""`parlay distill draft`: from a target to a measured draft file, each stage resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def distill_draft(
    out: Annotated[
        Path | None, typer.Option(help="the draft's file; with --measure-only: the shipped one")
    ] = None,
    work: Annotated[
        Path, typer.Option(help="folder of what the stages make; a killed run resumes from it")
    ] = Path("distill-work"),
    minutes: Annotated[float, typer.Option(help="training time, after the text is made")] = 60.0,
    seed: Annotated[int, typer.Option(help="of prompts, draws and order")] = 1,
    prompts: Annotated[int, typer.Option(help="prompts that the target answers")] = 8000,
    model: Annotated[
        Path | None, typer.Option(help="the target, a Hugging Face Llama folder")
    ] = None,
    measure_only: Annotated[
        bool, typer.Option("--measure-only", help="measure the draft in --out, train nothing")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the figures here")
    ] = None,
) -> None:
    """Train a draft model on what the target generates, and measure it by task."""
    try:
        if out is None and not measure_only:
            raise ValueError("say where the draft goes: --out FILE")
        if minutes <= 0 or prompts < 1:
            raise ValueError("--minutes and --prompts must be above 0")
        from rich.console import Console

        from parlay.engine.distill.pipeline import Settings, make, measure
        from parlay.engine.llm import SHIPPED_DRAFT

        settings = Settings(work, seed, prompts, minutes, model)
        stage = measure if measure_only else make
        figures = stage(settings, out or SHIPPED_DRAFT, Console(stderr=True))
        if json_file is not None:
            json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        typer.echo(f"parlay distill draft: {error}", err=True)
        raise typer.Exit(1) from None
