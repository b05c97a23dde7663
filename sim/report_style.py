"""What the report's pictures share: colours, typeface, and how they become part of the page.

Blue is faster than no speculation and orange is slower in every picture.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FASTER, SLOWER, INK, MUTED, FAINT = "#1a5fa8", "#b04a00", "#1b1f24", "#5c6570", "#d9dde2"
LETTERS = 160
"""Small letters that fit across a wide picture."""
STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}
"""Settings of matplotlib for every picture."""


def title(axes: Axes, text: str) -> None:
    """Write a title at the left, and leave out the ticks' strokes."""
    axes.set_title(text, loc="left", fontsize=9, weight="bold")
    axes.tick_params(length=0)


def two_lines(policy: str) -> str:
    """Return a policy's name, its settings below it where they are long."""
    name, colon, settings = policy.partition(":")
    return f"{name}:\n{settings}" if colon and len(policy) > 28 else policy


def svg(figure: Figure, key: str, alt: str) -> Markup:
    """Return the figure as an SVG element; `key` keeps its ids apart from other figures'."""
    safe = re.sub(r"\W", "-", key)
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": safe}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{safe}-", text[text.index("<svg") :])
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1))
