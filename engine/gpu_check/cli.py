"""`parlay gpu-check`, thin: options in, one clear line where something is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gpu_check(
    device: Annotated[
        str, typer.Option(help="cuda, or cpu for a look at the check itself")
    ] = "cuda",
    shape: Annotated[
        list[str] | None,
        typer.Option(help="1b, 8b or tiny; give it repeatedly [default: 1b 8b, tiny on a CPU]"),
    ] = None,
    minutes: Annotated[float, typer.Option(help="the check plans to end within")] = 3.5,
    json_file: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="figures, and the simulator's profile")
    ] = Path("gpu-check.json"),
) -> None:
    """Check on this GPU that the engine is right, and measure what its passes and policies take.

    The figures are also a cost profile: `parlay simulate --costs gpu-check.json` (its last shape;
    gpu-check.json#1b names another). A picture stands beside them.
    """
    try:
        passed = _run(device, shape, minutes, json_file)
    except (ValueError, OSError) as error:
        typer.echo(f"parlay gpu-check: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    if not passed:
        raise typer.Exit(1)


def _run(device: str, shapes: list[str] | None, minutes: float, json_file: Path) -> bool:
    """Run the check; raises ValueError for options that cannot be."""
    from rich.console import Console

    from parlay.engine.gpu_check.main import device_named, run_check
    from parlay.engine.gpu_check.plot import plot
    from parlay.engine.gpu_check.shapes import SHAPES
    from parlay.policies.files import check_writable

    place = device_named(device)
    names = shapes or (["tiny"] if place.type == "cpu" else ["1b", "8b"])
    for name in names:
        if name not in SHAPES:
            raise ValueError(f"no shape '{name}'; choose of {', '.join(SHAPES)}")
    if not 0.0 < minutes <= 60.0:
        raise ValueError(f"minutes must be above 0 and at most 60, not {minutes:g}")
    check_writable(json_file)
    console = Console()
    document = run_check(list(dict.fromkeys(names)), place, minutes, json_file, console)
    picture = json_file.with_suffix(".png")
    drawn = plot(document, picture)
    console.print(f"figures: {json_file}; as costs: parlay simulate --costs {json_file}")
    console.print(f"picture: {picture}" if drawn else "no picture: matplotlib is not installed")
    for line in document["verdict"]:
        typer.echo(f"parlay gpu-check: {line}", err=True)
    return bool(document["passed"])
