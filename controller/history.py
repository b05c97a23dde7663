"""What engines did in each of the last spans of time; a ring of sums, and series made from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlay.policies.types import Array

_LEAST_SPANS = 30
BUCKET_S = 2.0
BUCKETS = 300
ROWS_OF = ("rows_none", "rows_ngram", "rows_draft_model", "rows_medusa")
FIELDS = (
    *("steps", "emitted", "step_ms", "running", "waiting", "gain", "gains", "guard_gain"),
    *(*ROWS_OF, "fallbacks", "all_rows"),
)
"""Columns of a history. gain, gains: the sum of the expected gains and how many; running, waiting,
guard_gain: sums over steps."""
_AT = {name: place for place, name in enumerate(FIELDS)}


class History:
    """What an engine did in each of the last BUCKETS spans of BUCKET_S: f64 [BUCKETS, FIELDS]."""

    def __init__(self) -> None:
        self._sums = np.zeros((BUCKETS, len(FIELDS)))
        self._bucket = np.full(BUCKETS, -1, np.int64)

    def add(self, at_s: Array, values: dict[str, Array]) -> None:
        """Add values [n] by field to the spans that hold the moments at_s f64 [n]."""
        bucket = (at_s // BUCKET_S).astype(np.int64)
        row = bucket % BUCKETS
        for fresh in np.unique(bucket[self._bucket[row] != bucket]).tolist():
            self._bucket[fresh % BUCKETS] = fresh
            self._sums[fresh % BUCKETS] = 0.0
        for name, value in values.items():
            np.add.at(self._sums[:, _AT[name]], row, value)

    def until(self, now_s: float, spans: int = BUCKETS) -> tuple[Array, dict[str, Array]]:
        """Return the starts of the last whole spans, unix s, and their sums by field."""
        last = int(now_s // BUCKET_S)
        bucket = np.arange(last - spans, last)
        row = bucket % BUCKETS
        sums = np.where((self._bucket[row] == bucket)[:, None], self._sums[row], 0.0)
        return bucket * BUCKET_S, dict(zip(FIELDS, sums.T, strict=True))


def series(histories: list[History], now_s: float, started_s: float) -> dict[str, Any]:
    """Return series over time: sums over engines, and means of the gains; nan without steps.

    They begin where the observatory did, at started_s, or a minute ago at least.
    """
    spans = int((now_s - started_s) // BUCKET_S) + 1
    last = min(max(spans, _LEAST_SPANS), BUCKETS)
    found = [history.until(now_s, last) for history in histories]
    at_s = found[0][0] if found else np.zeros(0)
    of = [sums for _, sums in found]
    with np.errstate(all="ignore"):
        rate = _over([1e3 * f["emitted"] / f["step_ms"] for f in of], len(at_s))
        gain = [f["gain"] / f["gains"] for f in of]
        each = [1e3 * f["emitted"] / f["step_ms"] / g for f, g in zip(of, gain, strict=True)]
        guard = [f["guard_gain"] / f["steps"] for f in of]
        rows = {name: _over([f[name] for f in of], len(at_s)) for name in ROWS_OF}
        total = sum(rows.values()) if rows else np.zeros(0)
        seen = _over([f["all_rows"] for f in of], len(at_s))
        load = {
            name: np.where(seen > 0.0, _over([f[name] / f["steps"] for f in of], len(at_s)), np.nan)
            for name in ("running", "waiting")
        }
        plain = _over(each, len(at_s))
        return {
            "bucket_s": BUCKET_S,
            "at_s": at_s,
            "tokens_per_s": np.where(rate > 0.0, rate, np.nan),
            "plain_tokens_per_s": np.where(plain > 0.0, plain, np.nan),
            "expected_gain": np.where(plain > 0.0, rate / plain, np.nan),
            "guard_gain": _mean_over(guard, len(at_s)),
            **load,
            "shares": {name.removeprefix("rows_"): n / total for name, n in rows.items()},
            "fallback_share": _over([f["fallbacks"] for f in of], len(at_s)) / seen,
        }


def _over(series: list[Array], length: int) -> Array:
    """Return the sum of series f64 [length], nan counted as 0."""
    return np.nan_to_num(np.stack(series)).sum(axis=0) if series else np.zeros(length)


def _mean_over(series: list[Array], length: int) -> Array:
    """Return the mean of series where they are known, nan where none is."""
    if not series:
        return np.zeros(length)
    table = np.stack(series)
    known = np.isfinite(table)
    mean: Array = np.where(known, table, 0.0).sum(axis=0) / known.sum(axis=0)
    return mean
