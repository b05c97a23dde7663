"""How the values of `parlay serve`'s keys are read, from texts and from TOML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

LEVELS = ("debug", "info", "warning", "error")


def parse_settings(pairs: Iterable[str], name: str = "--set") -> dict[str, str]:
    """Split key=value pairs; raises ValueError for anything else."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"{name} {pair}: write it as key=value".lstrip())
        found[key] = value
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("must be a text")
    return value


def _path(value: Any) -> Path:
    if not _text(value):
        raise ValueError("must be a path")
    return Path(value).expanduser()


def _share(value: Any) -> float:
    wrong = "must be a number, 0 to 1"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(wrong)
    try:
        share = float(value)
    except ValueError:
        raise ValueError(wrong) from None
    if not 0.0 <= share <= 1.0:
        raise ValueError(wrong)
    return share


def _switch(value: Any) -> bool:
    text = str(value).lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _mode(value: Any) -> int:
    text = value if isinstance(value, str) else ""
    digits = text.removeprefix("0o")
    if not digits or not set(digits) <= set("01234567") or int(digits, 8) & ~0o777:
        raise ValueError("must be octal, as a text: '0660'")
    if int(digits, 8) & 0o600 != 0o600:
        raise ValueError("must let its owner read and write: '0600'")
    return int(digits, 8)


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a list of names")
    return tuple(part.strip() for part in parts if part.strip())


def _pairs(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        if any(isinstance(one, Mapping) for one in value.values()):
            raise ValueError("must be a table of values")
        return {str(key): _setting(one) for key, one in value.items()}
    return parse_settings(value.split() if isinstance(value, str) else value, "")


def _setting(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _level(value: Any) -> str:
    if str(value).lower() not in LEVELS:
        raise ValueError(f"must be one of {', '.join(LEVELS)}")
    return str(value).lower()


KINDS: dict[str, Callable[[Any], Any]] = {
    "text": _text,
    "path": _path,
    "share": _share,
    "mode": _mode,
    "names": _names,
    "switch": _switch,
    "pairs": _pairs,
    "level": _level,
}
