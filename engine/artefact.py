"""Files of weights that parlay makes: safetensors with one JSON object about them in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parlay.engine.int8_rows import widened


def read_artefact(
    path: Path, key: str, named: str, foreign: str, version: int, mend: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a file's header object under `key`, and its tensors.

    named: the file's kind with its verb, "draft is" say; foreign: what to say of a file of another
    kind. Raises ValueError in one line, which ends with `mend` where the file can be made again.
    """
    kind, verb = named.split()
    if not path.is_file():
        raise ValueError(f"{kind} {path} {verb} missing; {mend}")
    try:
        with safe_open(path, framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get(key, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{kind} {path} {verb} damaged ({error}); {mend}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} {foreign}")
    if header.get("version") != version:
        has = "has" if verb == "is" else "have"
        raise ValueError(
            f"{kind} {path} {has} format {header.get('version')}, this parlay reads {version};"
            f" {mend}"
        )
    return header, tensors


def within(ids: Tensor, count: int) -> bool:
    """Say whether every id is a whole number, one of 0 .. count - 1."""
    return ids.dtype in (torch.int32, torch.int64) and bool(((ids >= 0) & (ids < count)).all())


def finite(w: Tensor) -> bool:
    """Say whether no number is NaN or infinite."""
    # Both ends tell of all: a NaN anywhere comes out at them, in one pass without a copy.
    return bool(torch.stack(torch.aminmax(w)).isfinite().all())


def stored(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], what: str, mend: str
) -> Tensor:
    """Return a tensor in bfloat16, widened where it is int8; what, mend: of the ValueError."""
    w, scale = tensors.get(name), tensors.get(f"{name}.scale")
    if w is None or tuple(w.shape) != shape:
        raise ValueError(f"{what} ({name}); {mend}")
    if w.dtype == torch.int8:
        if scale is None or w.dim() != 2 or scale.shape != w.shape[:1]:
            raise ValueError(f"{what} ({name}.scale); {mend}")
        w = widened(w, scale)
    if not finite(w.bfloat16()):
        raise ValueError(f"{what} ({name} has NaN or infinity); {mend}")
    return w.bfloat16()
