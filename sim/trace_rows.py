"""Rows of a CSV or JSON-lines file, one at a time, and the numbers in them.

What is wrong raises ValueError "PATH:LINE: what is wrong; how to mend it", LINE being that on which
the row starts.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TextIO

Row = Mapping[str, object]

_LINE_MOST = 1 << 20
_TOKENS_MOST = 1 << 31
_EPOCH = datetime(2023, 1, 1, tzinfo=UTC)


def open_text(path: Path) -> TextIO:
    """Return the file; bytes that are no UTF-8 are left for the row's reader to refuse."""
    try:
        return path.open(encoding="utf-8-sig", errors="replace", newline="")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ValueError(f"{path}: cannot be read ({why}); give the path of a trace") from None


@dataclass(slots=True)
class Lines:
    """A file's lines; number: of the last one read, start: of the first one of its row."""

    path: Path
    file: TextIO
    number: int = 0
    start: int = 1
    cut: bool = False

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        line = self.file.readline(_LINE_MOST)
        if not line:
            raise StopIteration
        self.number += 1
        self.cut = not line.endswith(("\n", "\r"))
        if len(line) == _LINE_MOST:
            self.start, self.cut = self.number, False
            raise self.wrong(f"the line has {_LINE_MOST} characters or more")
        return line

    def wrong(self, what: str, mend: str = "") -> ValueError:
        """Return the error of this row, and how to mend it."""
        usual = "the file seems cut off here: fetch it again" if self.cut else "mend or delete it"
        return ValueError(f"{self.path}:{self.start}: {what}; {mend or usual}")


def csv_rows(lines: Lines) -> Iterator[list[str]]:
    """Yield each row's fields, the header's first; blank lines are passed over."""
    reader = csv.reader(lines, strict=True)
    while True:
        lines.start = lines.number + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise lines.wrong(f"not a CSV row ({error})") from None
        if row is None:
            return
        if len(row) > 1 or (row and row[0].strip()):
            yield row


def csv_records(lines: Lines) -> Iterator[Row]:
    """Yield each row by the header's names."""
    rows = csv_rows(lines)
    names = [name.strip() for name in next(rows, [])]
    for row in rows:
        if len(row) != len(names):
            raise lines.wrong(f"{len(row)} fields where the header has {len(names)}")
        yield dict(zip(names, row, strict=True))


def json_records(lines: Lines) -> Iterator[Row]:
    """Yield each line's object; blank lines are passed over."""
    for line in lines:
        lines.start = lines.number
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            # The decoder's own text would name a line of the row, not of the file.
            why = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long"
            raise lines.wrong(f"not a JSON object ({why})") from None
        if not isinstance(row, dict):
            raise lines.wrong(f"not a JSON object ({type(row).__name__})")
        yield row


def value(row: Row, column: str) -> object:
    """Return a field; raises ValueError if there is none."""
    if column not in row:
        raise ValueError(f"there is no {column}")
    return row[column]


def tokens(row: Row, column: str, least: int) -> int:
    """Return a count of tokens; raises ValueError if it is none, or below `least`."""
    found = value(row, column)
    number = _number(found)
    if not (least <= number < _TOKENS_MOST and number.is_integer()):
        raise ValueError(f"{column} must be a whole number from {least}, not {str(found)[:60]!r}")
    return int(number)


def hashes(row: Row, column: str) -> list[int]:
    """Return a list of whole numbers; raises ValueError if it is none."""
    found = value(row, column)
    if not isinstance(found, list) or not all(type(h) is int for h in found):
        raise ValueError(f"{column} must be a list of whole numbers, not {str(found)[:60]}")
    return found


def seconds(row: Row, column: str) -> float:
    """Return a time in s; raises ValueError if it is no number."""
    number = _number(found := value(row, column))
    if not isfinite(number):
        raise ValueError(f"{column} must be a time in numbers, not {str(found)[:60]!r}")
    return number


def milliseconds(row: Row, column: str) -> float:
    """Return a time in s that is given in ms."""
    return seconds(row, column) / 1e3


def instant(row: Row, column: str) -> float:
    """Return a date and time in s since a fixed one; without a zone it is UTC."""
    found = str(value(row, column)).strip()
    try:
        at = datetime.fromisoformat(found)
    except ValueError:
        like = "2023-11-16 18:17:03.9799600"
        raise ValueError(f"{column} must be a time like {like}, not {found[:60]!r}") from None
    return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH).total_seconds()


def _number(found: object) -> float:
    if not isinstance(found, int | float | str) or isinstance(found, bool):
        return float("nan")
    try:
        return float(found)
    except (ValueError, OverflowError):
        return float("nan")
