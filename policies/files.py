"""Files that commands write: known to be writable first, there as a whole or not at all.

And what to say of one that was read and holds something else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def check_writable(path: Path) -> None:
    """Find out before the work, not after it; raises ValueError where path cannot be a file."""
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write {path}: name a file in a folder that can be written")


def write_whole(path: Path, fill: Callable[[IO[str]], Any]) -> Any:
    """Write a file that is there as a whole or not at all; return what `fill` returns."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            done = fill(file)
        part.replace(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return done


def write_json(path: Path, value: Any) -> None:
    """Write JSON; nan, which JSON has not, is null."""
    text = json.dumps(_nulled(value), indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text))


def _nulled(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: _nulled(of) for key, of in value.items()}
    return [_nulled(of) for of in value] if isinstance(value, list | tuple) else value


def fault_of(error: Exception) -> str:
    """Return in words what is wrong with what a file holds: a KeyError says what it lacks."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
