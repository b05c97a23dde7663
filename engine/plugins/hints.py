"""What a request may ask of its speculation, as key and value through an engine's own API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parlay.engine.request import ALL_PROPOSERS, SpeculationParams
from parlay.policies.types import K_LIMIT, Proposer

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def speculation_of(hints: Mapping[str, Any] | None, prefix: str = "") -> SpeculationParams:
    """Return what a request allows; keys are `prefix` and one of the below, others are not ours.

    speculate (bool; false opts out), max_k (int), proposers (names, as a list or between commas),
    task (a tag; requests of one tag learn from each other), tpot_target_ms (number). Values may be
    strings, as they come over HTTP. Raises ValueError for a value that makes no sense, and without
    a prefix for an unknown key.
    """
    found = {k.removeprefix(prefix): v for k, v in (hints or {}).items() if k.startswith(prefix)}
    known = ("speculate", "max_k", "proposers", "task", "tpot_target_ms")
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"unknown hint '{prefix}{unknown[0]}'; known: {', '.join(known)}")
    speculate = _flag(prefix, found.get("speculate", True))
    return SpeculationParams(
        proposer_mask=_mask(found["proposers"]) if "proposers" in found else ALL_PROPOSERS,
        max_k=_number(prefix, "max_k", found.get("max_k", K_LIMIT), int) if speculate else 0,
        task=str(found.get("task", "")),
        tpot_target_ms=_number(prefix, "tpot_target_ms", found.get("tpot_target_ms", "nan"), float),
    )


def _flag(prefix: str, value: Any) -> bool:
    word = str(value).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"hint {prefix}speculate must be true or false, not {value!r}")
    return word in _TRUE


def _number(prefix: str, key: str, value: Any, kind: type) -> Any:
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or (kind is int and float(value) != number):
        raise ValueError(f"hint {prefix}{key} must be of type {kind.__name__}, not {value!r}")
    return number


def _mask(names: str | Iterable[str]) -> int:
    wanted = names.split(",") if isinstance(names, str) else names
    known = {p.name.lower(): p for p in Proposer if p}
    mask = 0
    for name in (str(n).strip().lower() for n in wanted):
        if name not in known:
            raise ValueError(f"unknown proposer {name!r}; known: {', '.join(known)}")
        mask |= 1 << known[name]
    return mask
