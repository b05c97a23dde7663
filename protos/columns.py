"""Columns of a message <-> numpy arrays, with the checks that keep hostile numbers out.

A table names each column once: its type on the wire, its type in memory, the values it may take.
The same table reads the twin of raw bytes (one copy a column) and the typed schema (a number at a
time). Columns of the same width are read and checked together: of a batch of a few hundred, what
costs is how often numpy is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from parlay.policies.types import (
    K_LIMIT,
    PROPOSERS,
    Array,
    PlanSource,
    Reason,
    ShadowKind,
    Truncated,
)

I32_MAX = 2**31 - 1
ROUNDING = 1e-5
"""A float's upper bound may be passed by so much: probabilities are sums of float32."""
F32_MAX = float(np.finfo(np.float32).max)
MOST_MS = 1e7
"""No step takes hours: longer, and a clock went wrong, or its machine stood still."""


_UNSIGNED = {width: np.dtype(f"<u{width}") for width in (1, 4, 8)}
_ANY = 2**32 - 1


class Misfit(ValueError):
    """A column has not the length that its message's counts give it."""


@dataclass(slots=True, frozen=True)
class Column:
    """One column: name, type on the wire and in memory, smallest and largest value (None: any).

    most: the largest value's bits, where all that are out of range have larger ones.
    """

    name: str
    wire: np.dtype[Any]
    memory: np.dtype[Any]
    low: float | None = None
    high: float | None = None
    nan: bool = False
    most: int | None = None


def _column(name: str, wire: str, memory: str) -> Column:
    return Column(name, np.dtype(wire), np.dtype(memory))


def _integers(name: str, memory: str, high: int, low: int = 0) -> Column:
    # Seen as unsigned, negative numbers are the largest: one pass does for both ends.
    most = None if low else high
    return Column(name, np.dtype("<i4"), np.dtype(memory), low, high, most=most)


def _codes(name: str, count: int) -> Column:
    return Column(name, np.dtype("<u4"), np.dtype("u1"), None, count - 1, most=count - 1)


def _floats(name: str, high: float = F32_MAX, low: float = 0.0, nan: bool = False) -> Column:
    # As integers, infinity and nan are above all numbers, and negative ones above them.
    most = None if low or nan else int(np.array(high, "<f4").view("<u4"))
    return Column(name, np.dtype("<f4"), np.dtype("f4"), low, high, nan, most)


@dataclass(slots=True, frozen=True)
class Run:
    """Columns of a block that are side by side: their names, type in memory, and where they are.

    same: whether the bits of a number that is in range are the same in memory.
    """

    names: tuple[str, ...]
    memory: np.dtype[Any]
    at: slice
    same: bool


@dataclass(slots=True, frozen=True)
class Block:
    """Columns of one width that are read, and checked, together.

    most u32 [columns]: the `most` of each; None where a column has none.
    """

    columns: tuple[Column, ...]
    runs: tuple[Run, ...]
    most: Array | None


@dataclass(slots=True, frozen=True)
class Table:
    """The columns of a message that have a value a row."""

    columns: tuple[Column, ...]
    blocks: tuple[Block, ...]


def _table(*columns: Column) -> Table:
    """Return a table; a block for each width, and for each column whose bits do not tell."""

    def kind(column: Column) -> tuple[int, str]:
        width = column.wire.itemsize
        told = width != 4 or column.most is not None or column.high is None
        return width, "" if told else column.name

    ordered = sorted(columns, key=lambda column: (*kind(column), column.memory.str))
    return Table(columns, tuple(_block(tuple(same)) for _, same in groupby(ordered, key=kind)))


def _block(columns: tuple[Column, ...]) -> Block:
    runs, start = [], 0
    for memory, found in groupby(columns, key=lambda column: column.memory):
        names = tuple(column.name for column in found)
        same = memory.itemsize == columns[0].wire.itemsize and memory.kind != "b"
        runs.append(Run(names, memory, slice(start, start := start + len(names)), same))
    most = [_ANY if column.high is None else column.most for column in columns]
    known = columns[0].wire.itemsize == 4 and None not in most
    return Block(columns, tuple(runs), np.array(most, np.uint32) if known else None)


REQUEST_ID = _column("request_id", "<u8", "u8")
TASK = _column("task", "<u4", "u4")
VIEW = _table(
    REQUEST_ID,
    TASK,
    _integers("context_tokens", "i4", I32_MAX),
    _integers("output_tokens", "i4", I32_MAX),
    _integers("prefill_tokens", "i4", I32_MAX),
    _floats("temperature"),
    _integers("max_k", "i4", K_LIMIT),
    _codes("proposer_mask", 1 << PROPOSERS),
    _floats("tpot_target_ms", nan=True),
    _floats("recent_accept"),
    _integers("match_tokens", "i4", I32_MAX),
    _integers("draft_kv_lag", "i4", I32_MAX),
    _column("seeded", "u1", "?"),
)
PLAN = _table(
    REQUEST_ID,
    _codes("proposer", PROPOSERS),
    _integers("k", "i2", K_LIMIT),
    _column("shadow", "u1", "?"),
    _floats("propensity", high=1.0),
    _codes("reason", len(Reason)),
)
DEFAULTS = _table(TASK, _codes("proposer", PROPOSERS), _integers("k", "i2", K_LIMIT))
OUTCOME = _table(
    REQUEST_ID,
    TASK,
    _codes("proposer", PROPOSERS),
    _integers("requested_k", "i2", K_LIMIT),
    _integers("drafted_k", "i2", K_LIMIT),
    _integers("verified_k", "i2", K_LIMIT),
    _integers("accepted", "i2", K_LIMIT),
    _integers("emitted", "i2", K_LIMIT + 1),
    _integers("match_tokens", "i4", I32_MAX),
    _codes("truncated_by", len(Truncated)),
    _codes("plan_source", len(PlanSource)),
    _column("plan_step_id", "<u8", "u8"),
)
SHADOW = _table(
    REQUEST_ID,
    _codes("proposer", PROPOSERS),
    _integers("offered_k", "i2", K_LIMIT),
    _floats("matched", high=K_LIMIT),
    _integers("observed", "i2", K_LIMIT),
    _integers("match_tokens", "i4", I32_MAX),
    _codes("kind", len(ShadowKind)),
)

EDGES = _integers("bucket_edges", "i4", I32_MAX, low=1)
CONFIDENCES = _floats("confidences", high=1.0, nan=True)
DRAFT_MS = _floats("draft_ms", high=MOST_MS)
SURVIVAL = _floats("values", high=1.0)
HAZARD = _floats("hazard", high=1.0)
FRAILTY = _floats("frailty")
PRICES = _floats("draft_token_price_ms", nan=True)
SLOPE = _floats("slope", low=-F32_MAX)
OFFSET = _floats("offset", low=-F32_MAX)

Read = Callable[[Any, Sequence[Column], int], Array]
"""Columns of one width, one after the other as unsigned integers of it; raises Misfit."""


def read_raw(message: Any, columns: Sequence[Column], count: int) -> Array:
    """Return columns of a `parlay.wire.v1` message; raises Misfit where a length is wrong."""
    parts, width = [], columns[0].wire.itemsize
    size = count * width
    for column in columns:
        part = getattr(message, column.name)
        if len(part) != size:
            raise Misfit(f"{column.name} has {len(part)} bytes for {count} values")
        parts.append(part)
    return np.frombuffer(b"".join(parts), _UNSIGNED[width])


def read_typed(message: Any, columns: Sequence[Column], count: int) -> Array:
    """Return columns of a `parlay.v1` message; raises Misfit where a length is wrong."""
    width = columns[0].wire.itemsize
    found = np.empty((len(columns), count), _UNSIGNED[width])
    for place, column in enumerate(columns):
        values = getattr(message, column.name)
        if len(values) != count:
            raise Misfit(f"{column.name} has {len(values)} values, not {count}")
        found[place] = np.array(values, column.wire).view(_UNSIGNED[width])
    return found.ravel()


def read_column(read: Read, message: Any, column: Column, count: int) -> Array:
    """Return one column that is as wide in memory as on the wire.

    Raises Misfit, and ValueError where a value is out of range.
    """
    found = read(message, (column,), count)
    if count and (column.most is None or np.maximum.reduce(found) > column.most):
        _check(found.view(column.wire), column)
    return found.view(column.memory)


def read_columns(read: Read, message: Any, table: Table, rows: int) -> dict[str, Array]:
    """Return every column of a table by name; raises as `read_column`."""
    columns: dict[str, Array] = {}
    for block in table.blocks:
        found = read(message, block.columns, rows).reshape(len(block.columns), rows)
        _check_block(found, block)
        for run in block.runs:
            part = found[run.at]
            typed = part.view(run.memory) if run.same else part.astype(run.memory)
            columns.update(zip(run.names, typed, strict=True))
    return columns


def write(values: Array, column: Column) -> bytes:
    """Return a column's bytes, row-major; raises ValueError where a number does not fit."""
    wire = column.wire
    if values.dtype.kind in "iu" and values.dtype.itemsize > wire.itemsize and values.size:
        limits = np.iinfo(wire)
        if values.min() < limits.min or values.max() > limits.max:
            raise ValueError(f"{column.name} has a value that does not fit {wire.name}")
    return values.astype(wire, copy=False).tobytes()


def write_columns(message: Any, values: Any, table: Table, rows: int) -> None:
    """Write every column of a table; raises ValueError where one has not so many rows."""
    for column in table.columns:
        array = getattr(values, column.name)
        if len(array) != rows:
            raise ValueError(f"{column.name} has {len(array)} rows, not {rows}")
        setattr(message, column.name, write(array, column))


def _check_block(found: Array, block: Block) -> None:
    """Raise ValueError where a value of a block, [columns, rows], is out of range."""
    if not found.size or found.itemsize != 4:
        return
    if block.most is None or (np.maximum.reduce(found, axis=1) > block.most).any():
        for values, column in zip(found, block.columns, strict=True):
            _check(values.view(column.wire), column)


def _check(array: Array, column: Column) -> None:
    """Raise ValueError where a value of a column is out of range.

    Bits alone do not tell of -0.0, nor of sums of float32 that are a little above their bound.
    """
    if not _within(array, column):
        raise ValueError(f"{column.name} must be {_range(column)}")


def _within(array: Array, column: Column) -> bool:
    if column.high is None:
        return True
    least, most = (np.fmin, np.fmax) if column.nan else (np.minimum, np.maximum)
    bottom, top = least.reduce(array), most.reduce(array)
    high = column.high + (ROUNDING if column.wire.kind == "f" else 0.0)
    inside = (column.low is None or bottom >= column.low) and top <= high
    return bool(inside or (column.nan and np.isnan(bottom)))


def _range(column: Column) -> str:
    low = 0 if column.low is None else column.low
    if column.high == F32_MAX:
        text = "finite" if low < 0 else f"finite and at least {low:g}"
    elif column.high == I32_MAX:
        text = f"at least {low:g}"
    else:
        text = f"between {low:g} and {column.high:g}"
    return f"{text}, or nan" if column.nan else text
