"""Columns of a message <-> numpy arrays, with the checks that keep hostile numbers out.

A table names each column once: its type on the wire, its type in memory, the values it may take.
The same table reads the twin of raw bytes (one copy a column) and the typed schema (a number at a
time).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


class Misfit(ValueError):
    """A column has not the length that its message's counts give it."""


@dataclass(slots=True, frozen=True)
class Column:
    """One column: name, type on the wire and in memory, smallest and largest value (None: any)."""

    name: str
    wire: np.dtype[Any]
    memory: np.dtype[Any]
    low: float | None = None
    high: float | None = None
    nan: bool = False


def _column(name: str, wire: str, memory: str) -> Column:
    return Column(name, np.dtype(wire), np.dtype(memory))


def _integers(name: str, memory: str, high: float, low: float = 0) -> Column:
    return Column(name, np.dtype("<i4"), np.dtype(memory), low, high)


def _codes(name: str, count: int) -> Column:
    return Column(name, np.dtype("<u4"), np.dtype("u1"), None, count - 1)


def _floats(name: str, high: float = F32_MAX, low: float = 0.0, nan: bool = False) -> Column:
    return Column(name, np.dtype("<f4"), np.dtype("f4"), low, high, nan)


REQUEST_ID = _column("request_id", "<u8", "u8")
TASK = _column("task", "<u4", "u4")
VIEW = (
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
PLAN = (
    REQUEST_ID,
    _codes("proposer", PROPOSERS),
    _integers("k", "i2", K_LIMIT),
    _column("shadow", "u1", "?"),
    _floats("propensity", high=1.0),
    _codes("reason", len(Reason)),
)
DEFAULTS = (TASK, _codes("proposer", PROPOSERS), _integers("k", "i2", K_LIMIT))
OUTCOME = (
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
SHADOW = (
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

_UNSIGNED = np.dtype("<u4")

Table = tuple[Column, ...]
Read = Callable[[Any, Column, int], Array]


def read_raw(message: Any, column: Column, count: int) -> Array:
    """Return a column of a `parlay.wire.v1` message; raises Misfit where its length is wrong."""
    data = getattr(message, column.name)
    if len(data) != count * column.wire.itemsize:
        raise Misfit(f"{column.name} has {len(data)} bytes for {count} values")
    return _checked(np.frombuffer(data, column.wire), column)


def read_typed(message: Any, column: Column, count: int) -> Array:
    """Return a column of a `parlay.v1` message; raises Misfit where its length is wrong."""
    values = getattr(message, column.name)
    if len(values) != count:
        raise Misfit(f"{column.name} has {len(values)} values, not {count}")
    return _checked(np.array(values, column.wire), column)


def write(values: Array, column: Column) -> bytes:
    """Return a column's bytes, row-major; raises ValueError where a number does not fit."""
    wire = column.wire
    if values.dtype.kind in "iu" and values.dtype.itemsize > wire.itemsize and values.size:
        limits = np.iinfo(wire)
        if values.min() < limits.min or values.max() > limits.max:
            raise ValueError(f"{column.name} has a value that does not fit {wire.name}")
    return values.astype(wire, copy=False).tobytes()


def read_columns(read: Read, message: Any, table: Table, rows: int) -> dict[str, Array]:
    """Return every column of a table by name."""
    return {column.name: read(message, column, rows) for column in table}


def write_columns(values: Any, table: Table, rows: int) -> dict[str, bytes]:
    """Return the bytes of every column of a table by name."""
    columns = {}
    for column in table:
        array = getattr(values, column.name)
        if len(array) != rows:
            raise ValueError(f"{column.name} has {len(array)} rows, not {rows}")
        columns[column.name] = write(array, column)
    return columns


def _checked(array: Array, column: Column) -> Array:
    """Return the column in its memory type; raises ValueError where a value is out of range."""
    if array.size and not _within(array, column):
        raise ValueError(f"{column.name} must be {_range(column)}")
    return array.astype(column.memory, copy=False)


def _within(array: Array, column: Column) -> bool:
    low, high, kind = column.low, column.high, column.wire.kind
    if kind == "f" and low is not None and high is not None:
        least, most = (np.fmin, np.fmax) if column.nan else (np.minimum, np.maximum)
        bottom, top = least.reduce(array), most.reduce(array)
        inside = bottom >= low and top <= high + ROUNDING
        return bool(inside or (column.nan and np.isnan(bottom)))
    if high is not None:
        # Seen as unsigned, negative numbers are the largest: one pass does for both ends.
        if np.maximum.reduce(array.view(_UNSIGNED)) > high:
            return False
        return not low or bool(np.minimum.reduce(array) >= low)
    return True


def _range(column: Column) -> str:
    low = 0 if column.low is None else column.low
    if column.high == F32_MAX:
        text = "finite" if low < 0 else f"finite and at least {low:g}"
    elif column.high == I32_MAX:
        text = f"at least {low:g}"
    else:
        text = f"between {low:g} and {column.high:g}"
    return f"{text}, or nan" if column.nan else text
