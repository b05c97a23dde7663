"""Options that `parlay generate` and `parlay engine` share, and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parlay.policies import DEFAULT_POLICY

ModelFolder = Annotated[Path | None, typer.Option(help="a Hugging Face checkpoint's folder")]
PolicyName = Annotated[
    str | None, typer.Option(help="what decides on speculation [default: pilot]")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a policy's setting")
]
Sidecar = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        help="let a `parlay serve` decide (unix:/path, host:port), and us where it is silent",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
OfDraft = Annotated[str | None, typer.Option(help="the draft model's [default: the model's]")]
TensorParallel = Annotated[int, typer.Option(help="processes that share the model's work")]
DraftTensorParallel = Annotated[int, typer.Option(help="of these, those that run the draft model")]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="same bits alone, batched, among drafts")
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="decide while the target's pass runs, on a core of its own [default: on a GPU]",
        show_default=False,
    ),
]
CorpusFiles = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="a text that drafts may be taken from; give it repeatedly"),
]


def chosen_policy(
    policy: str | None, settings: list[str] | None, sidecar: str | None
) -> tuple[str, dict[str, str]]:
    """Return the policy's name and settings; raises ValueError where a sidecar has its own."""
    if sidecar is not None and (policy is not None or settings):
        raise ValueError("--sidecar decides by its own policy: leave out --policy and --set")
    return policy or DEFAULT_POLICY, key_values(settings or [])


def key_values(pairs: list[str]) -> dict[str, str]:
    """Split key=value pairs; raises ValueError for anything else."""
    for pair in pairs:
        if not pair.partition("=")[0] or "=" not in pair:
            raise ValueError(f"--set {pair}: write it as key=value")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
