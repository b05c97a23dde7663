"""The check in one picture: passes against their floor, and the engine's speed by mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


def plot(document: Json, path: Path) -> bool:
    """Write a PNG with a row a shape; False where matplotlib is missing or nothing was measured.

    Raises ValueError where it cannot be written.
    """
    try:
        import matplotlib as mpl  # a GPU's machine may not have it
    except ModuleNotFoundError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sections = document["sections"]
    names = [n.removesuffix(" verify") for n in sections if n.endswith(" verify")]
    names = [n for n in names if sections[f"{n} verify"].get("rows")]
    if not names:
        return False
    figure, axes = plt.subplots(
        len(names), 2, figsize=(13, 4.5 * len(names)), squeeze=False, layout="constrained"
    )
    for (left, right), name in zip(axes, names, strict=True):
        _passes(left, sections[f"{name} verify"]["rows"])
        left.set(title=f"{name}: a verify pass over its byte floor", xlabel="tokens of the pass")
        _speeds(right, sections.get(f"{name} engine", {}).get("rows", ()))
        right.set(title=f"{name}: tokens/s over no speculation", xlabel="requests at once")
    figure.suptitle(f"{document['device']}, {document['dtype']}; synthetic verdicts")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write the plot: {error}") from None
    finally:
        plt.close(figure)
    return True


def _passes(axes: Any, rows: Sequence[Json]) -> None:
    for context in sorted({row["context_tokens"] for row in rows}):
        here = [row for row in rows if row["context_tokens"] == context]
        x = [row["batch"] * row["width"] for row in here]
        axes.plot(x, [r["ratio"] for r in here], ".", label=f"behind {context} tokens")
    axes.axhline(1.0, color="black", linewidth=0.7)
    axes.set(xscale="log", yscale="log", ylabel="times the floor")
    axes.legend()


def _speeds(axes: Any, rows: Sequence[Json]) -> None:
    plain = {r["batch"]: r["tokens_per_s"] for r in rows if r["mode"] == "none"}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        here = [r for r in rows if r["mode"] == mode and plain.get(r["batch"])]
        ratios = [r["tokens_per_s"] / plain[r["batch"]] for r in here]
        style = "-" if mode in ("goodput", "pilot") else "--"
        axes.plot([r["batch"] for r in here], ratios, style, marker=".", label=mode)
    axes.set(xscale="log", ylabel="times none")
    if rows:
        axes.set_xticks(sorted(plain), [str(batch) for batch in sorted(plain)])
        axes.set_xticks([], minor=True)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
