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


class Misfit(ValueError):
    """A column has not the length that its message's counts give it."""


@dataclass(slots=True, frozen=True)
class Column:
    """One column: name, type on the wire and in memory, smallest and largest value (None: any)."""

    name: str
    wire: str
    memory: str
    low: float | None = None
    high: float | None = None
    nan: bool = False


def _integers(name: str, memory: str, high: float, low: float = 0) -> Column:
    return Column(name, "<i4", memory, low, high)


def _codes(name: str, count: int) -> Column:
    return Column(name, "<u4", "u1", None, count - 1)


def _floats(name: str, high: float = F32_MAX, low: float = 0.0, nan: bool = False) -> Column:
    return Column(name, "<f4", "f4", low, high, nan)


REQUEST_ID = Column("request_id", "<u8", "u8")
TASK = Column("task", "<u4", "u4")
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
    Column("seeded", "u1", "?"),
)
PLAN = (
    REQUEST_ID,
    _codes("proposer", PROPOSERS),
    _integers("k", "i2", K_LIMIT),
    Column("shadow", "u1", "?"),
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
    Column("plan_step_id", "<u8", "u8"),
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
DRAFT_MS = _floats("draft_ms")
SURVIVAL = _floats("values", high=1.0)
HAZARD = _floats("hazard", high=1.0)
FRAILTY = _floats("frailty")
PRICES = _floats("draft_token_price_ms", nan=True)
SLOPE = _floats("slope", low=-F32_MAX)
OFFSET = _floats("offset", low=-F32_MAX)

Table = tuple[Column, ...]
Read = Callable[[Any, Column, int], Array]


def read_raw(message: Any, column: Column, count: int) -> Array:
    """Return a column of a `parlay.wire.v1` message; raises Misfit where its length is wrong."""
    data = getattr(message, column.name)
    wire = np.dtype(column.wire)
    if len(data) != count * wire.itemsize:
        raise Misfit(f"{column.name} has {len(data)} bytes for {count} values")
    return _checked(np.frombuffer(data, wire), column)


def read_typed(message: Any, column: Column, count: int) -> Array:
    """Return a column of a `parlay.v1` message; raises Misfit where its length is wrong."""
    values = getattr(message, column.name)
    if len(values) != count:
        raise Misfit(f"{column.name} has {len(values)} values, not {count}")
    return _checked(np.array(values, column.wire), column)


def write(values: Array, column: Column) -> bytes:
    """Return a column's bytes, row-major; raises ValueError where a number does not fit."""
    array = np.asarray(values)
    wire = np.dtype(column.wire)
    if array.dtype.kind in "iu" and array.dtype.itemsize > wire.itemsize and array.size:
        limits = np.iinfo(wire)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"{column.name} has a value that does not fit {wire.name}")
    return array.astype(wire, copy=False).tobytes()


def read_columns(read: Read, message: Any, table: Table, rows: int) -> dict[str, Array]:
    """Return every column of a table by name."""
    return {column.name: read(message, column, rows) for column in table}


def write_columns(values: Any, table: Table) -> dict[str, bytes]:
    """Return the bytes of every column of a table by name."""
    rows = len(values.request_id if table is not DEFAULTS else values.task)
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
    if column.wire == "<i4" and column.low == 0 and column.high is not None:
        # Seen as unsigned, negative numbers are the largest: one pass does for both ends.
        return bool(array.view("<u4").max() <= column.high)
    return _at_least(array, column) and _at_most(array, column)


def _at_least(array: Array, column: Column) -> bool:
    if column.low is None:
        return True
    lowest = np.fmin.reduce(array) if column.nan else array.min()
    return bool(lowest >= column.low) or (column.nan and bool(np.isnan(lowest)))


def _at_most(array: Array, column: Column) -> bool:
    if column.high is None:
        return True
    highest = np.fmax.reduce(array) if column.nan else array.max()
    slack = ROUNDING if column.wire == "<f4" else 0
    return bool(highest <= column.high + slack) or (column.nan and bool(np.isnan(highest)))


def _range(column: Column) -> str:
    low = 0 if column.low is None else column.low
    if column.high == F32_MAX:
        text = "finite" if low < 0 else f"finite and at least {low:g}"
    elif column.high == I32_MAX:
        text = f"at least {low:g}"
    else:
        text = f"between {low:g} and {column.high:g}"
    return f"{text}, or nan" if column.nan else text
