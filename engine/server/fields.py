"""Reads a JSON object field by field: every field is checked, and none is left over."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from parlay.engine.server.errors import ApiError, invalid

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; raises ApiError for anything else."""
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
        if _SURROGATE.search(body):  # half a character, which no tokenizer and no answer can hold
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeError:
        raise invalid("the body is no valid UTF-8 text", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """The fields of one object, taken one after the other; null is the same as absent.

    Every method raises ApiError (400) with the field's name where its value is of a wrong kind.
    """

    def __init__(self, body: Mapping[str, Any], where: str = "") -> None:
        self._body, self._where = body, where
        self._left = {name for name, value in body.items() if value is not None}
        self.given = bool(self._left)

    def path(self, name: str) -> str:
        """Return the field's name as the client knows it, from the top."""
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> Any:
        """Return a field as it stands, None where it is absent."""
        self._left.discard(name)
        return self._body.get(name)

    def wrong(self, name: str, expected: str) -> ApiError:
        """Return the refusal of a field's value."""
        shown = json.dumps(self._body.get(name))
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        path = self.path(name)
        return invalid(f"{path} must be {expected}, not {shown}", path)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Take an integer within bounds."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Take a number within bounds."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high or math.isinf(value):
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Take true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Take a string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def object(self, name: str) -> Fields:
        """Take an object; absent is empty."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value or {}, self.path(name))

    def only(self, name: str, neutral: Iterable[Any]) -> None:
        """Take a field that is not supported: only what changes nothing may stand there."""
        value = self.take(name)
        if value is not None and not any(_same(value, n) for n in neutral):
            path = self.path(name)
            raise invalid(
                f"{path} is not supported by this server: leave it out", path, "unsupported_field"
            )

    def ignore(self, *names: str) -> None:
        """Take fields that label a request and ask for nothing."""
        self._left.difference_update(names)

    def done(self) -> None:
        """Refuse what was not taken."""
        for name in sorted(self._left):
            path = self.path(name)
            raise invalid(f"unknown field '{path[:80]}': leave it out", path[:80], "unknown_field")


def _same(a: Any, b: Any) -> bool:
    return bool(a == b and isinstance(a, bool) == isinstance(b, bool))
