"""Options that the commands of `parlay distill` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from parlay.policies.files import write_json

WORK = Path("distill-work")
Work = Annotated[
    Path, typer.Option(help="folder of what the stages make; a killed run resumes from it")
]
Minutes = Annotated[float, typer.Option(help="training time, after the text is made")]
Seed = Annotated[int, typer.Option(help="of prompts, draws, weights and order")]
Prompts = Annotated[int, typer.Option(help="prompts that the target answers")]
Target = Annotated[Path | None, typer.Option(help="the target, a Hugging Face Llama folder")]
MeasureOnly = Annotated[
    bool, typer.Option("--measure-only", help="measure what is in --out, train nothing")
]


def check(out: Path | None, measure_only: bool, minutes: float, prompts: int, what: str) -> None:
    """Raise ValueError where a run could make nothing; what: the name of what it makes."""
    if out is None and not measure_only:
        raise ValueError(f"say where the {what}: --out FILE")
    if minutes <= 0 or prompts < 1:
        raise ValueError("--minutes and --prompts must be above 0")


def write_figures(file: Path | None, figures: dict[str, Any]) -> None:
    """Write figures as JSON where a file for them was given."""
    if file is not None:
        write_json(file, figures)
