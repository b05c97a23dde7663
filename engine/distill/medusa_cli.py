"""`parlay distill medusa`: from a target to measured Medusa heads, each stage resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def distill_medusa(
    out: Annotated[
        Path | None,
        typer.Option(help="the heads' file; with --measure-only: the shipped one, or a folder"),
    ] = None,
    work: Annotated[
        Path,
        typer.Option(help="folder of what the stages make, `distill draft`'s too; a run resumes"),
    ] = Path("distill-work"),
    minutes: Annotated[float, typer.Option(help="training time, after the text is made")] = 60.0,
    seed: Annotated[int, typer.Option(help="of prompts, draws, weights and order")] = 1,
    prompts: Annotated[int, typer.Option(help="prompts that the target answers")] = 8000,
    model: Annotated[
        Path | None, typer.Option(help="the target, a Hugging Face Llama folder")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="a draft's file to start from; none: the default model's, else random"),
    ] = None,
    measure_only: Annotated[
        bool, typer.Option("--measure-only", help="measure the heads in --out, train nothing")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the figures here")
    ] = None,
) -> None:
    """Train Medusa heads on what the target generates, and measure them by task."""
    try:
        if out is None and not measure_only:
            raise ValueError("say where the heads go: --out FILE")
        if minutes <= 0 or prompts < 1:
            raise ValueError("--minutes and --prompts must be above 0")
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
        if json_file is not None:
            json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        typer.echo(f"parlay distill medusa: {error}", err=True)
        raise typer.Exit(1) from None
