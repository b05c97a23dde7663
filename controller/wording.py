"""How figures are written, in the page and in the terminal alike; a dash stands for None."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with thousands set apart."""
    return "-" if value is None else f"{value:,.{digits}f}"


def share(value: float | None, digits: int = 0) -> str:
    """Return a share in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def gain(value: float | None) -> str:
    """Return a ratio of goodputs."""
    return "-" if value is None else f"{value:.2f}x"


def plain(value: Any) -> Any:
    """Return plain JSON values, None for nan and infinity, floats of six digits."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else None
    return value


def _short(value: float) -> float:
    return value if abs(value) >= 1e6 else float(f"{value:.6g}")
