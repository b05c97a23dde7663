"""Files of weights that parlay makes: safetensors with one JSON object about them in the header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor


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
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
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
    """Say whether every id is one of 0 .. count - 1."""
    return bool(((ids >= 0) & (ids < count)).all())
