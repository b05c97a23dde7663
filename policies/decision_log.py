"""The decision log on disk: Parquet files that are each whole, written and read as a stream.

A flush writes one file under a temporary name and renames it, so what was flushed is readable
whatever happens next. Needs pyarrow, which is imported when a log is opened.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.log_schema import (
    COLUMNS,
    SCHEMA_VERSION,
    Columns,
    LoggedStep,
    in_sample,
    joined,
    kept_rows,
    step_ranges,
    steps_of,
)
from parlay.policies.types import Array

_KEY = b"parlay.decision_log"
_PREFIX, _SUFFIX, _UNFINISHED = "decisions-", ".parquet", ".unfinished"
_BATCH_ROWS = 8192


@dataclass(slots=True, frozen=True)
class LogSettings:
    """sample_rate: share of requests kept; file_bytes: rows held in memory before they are written
    as a file; file_age_s: how long they are held at most; total_bytes: size of all files, the
    oldest of which go first.
    """  # noqa: D205

    sample_rate: float = 1.0
    file_bytes: int = 16 << 20
    file_age_s: float = 60.0
    total_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_rate <= 1.0:
            raise ValueError(f"decision log: sample_rate must be in [0, 1], not {self.sample_rate}")
        for name in ("file_bytes", "file_age_s", "total_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"decision log: {name} must be above 0, not {getattr(self, name)}")


class DecisionLog:
    """Writes a folder of log files; one writer a folder at a time.

    `append` only keeps rows, until there are enough of them or they are old enough to be written;
    the age is looked at when something is appended. A crash loses what was not flushed. Raises
    ValueError where pyarrow is missing; where a flush fails (OSError), its rows are lost.
    """

    def __init__(
        self,
        folder: Path,
        settings: LogSettings | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arrow, self._parquet = _pyarrow()
        self.folder, self.settings, self._clock_s = folder, settings or LogSettings(), clock_s
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
            left.unlink()
        names = [_number(path) for path in log_files(folder)]
        self._next = max(names, default=-1) + 1
        self._parts: list[Columns] = []
        self._bytes, self._since_s = 0, 0.0

    def append(self, columns: Columns) -> None:
        """Take a step's rows, from `rows_of`; writes a file where one is due."""
        rate = self.settings.sample_rate
        if rate < 1.0:
            columns = kept_rows(columns, in_sample(columns["request_id"], rate))
        now_s = self._clock_s()
        if len(columns["request_id"]):
            if not self._parts:
                self._since_s = now_s
            self._parts.append(columns)
            self._bytes += sum(values.nbytes for values in columns.values())
        old = self._parts and now_s - self._since_s >= self.settings.file_age_s
        if old or self._bytes >= self.settings.file_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is held as a file, and delete the oldest files beyond total_bytes."""
        if not self._parts:
            return
        parts, self._parts, self._bytes = self._parts, [], 0
        path = self.folder / f"{_PREFIX}{self._next:012d}{_SUFFIX}"
        self._next += 1
        unfinished = path.with_suffix(_UNFINISHED)
        try:
            with unfinished.open("wb") as file:
                table = _table(self._arrow, joined(parts))
                self._parquet.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        files = log_files(self.folder)
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes)
        for path, size in zip(files[:-1], sizes[:-1], strict=True):
            if total <= self.settings.total_bytes:
                break
            path.unlink()
            total -= size

    def close(self) -> None:
        """Write what is held."""
        self.flush()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True, frozen=True)
class LogReader:
    """The steps of a log, a folder or one file, in the order in which they were written.

    Can be iterated many times, holding some thousand rows at once. Iterating raises ValueError
    where there is no file, one is truncated or foreign, or of a newer version, or pyarrow is
    missing. A file that the writer deletes meanwhile is passed over.
    """

    path: Path

    def __iter__(self) -> Iterator[LoggedStep]:
        files = log_files(self.path) if self.path.is_dir() else [self.path]
        if not files or not files[0].exists():
            raise ValueError(f"{self.path} holds no decision log: there is no {_PREFIX}*{_SUFFIX}")
        for path in files:
            if path.exists():
                yield from _steps_in(path)


def log_files(folder: Path) -> list[Path]:
    """Return a folder's log files, oldest first."""
    return sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}"), key=_number)


def _number(path: Path) -> int:
    digits = path.stem.removeprefix(_PREFIX)
    if not digits.isdigit():
        raise ValueError(f"{path} is not named like a file of the decision log: move it away")
    return int(digits)


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError("the decision log needs pyarrow: pip install pyarrow") from None


def _table(arrow: Any, columns: Columns) -> Any:
    arrays = []
    for column in COLUMNS:
        values = arrow.array(columns[column.name])
        if column.count:
            ends = np.concatenate([[0], np.cumsum(columns[column.count])]).astype(np.int32)
            values = arrow.ListArray.from_arrays(ends, values)
        arrays.append(values)
    table = arrow.Table.from_arrays(arrays, names=[column.name for column in COLUMNS])
    return table.replace_schema_metadata({_KEY: str(SCHEMA_VERSION).encode()})


def _columns(batch: Any) -> Columns:
    found: dict[str, Array] = {}
    for column in COLUMNS:
        values = batch.column(column.name)
        if column.count:
            found[column.count] = values.value_lengths().to_numpy(zero_copy_only=False)
            values = values.flatten()
        array = values.to_numpy(zero_copy_only=False)
        found[column.name] = array.astype(column.dtype, copy=False)
    return found


def _steps_in(path: Path) -> Iterator[LoggedStep]:
    """Yield a file's steps; the last of a batch of rows waits for the rest of its rows."""
    waiting: Columns | None = None
    for columns in _batches(path):
        if waiting is not None:
            columns = joined([waiting, columns])
        start, _ = step_ranges(columns)[-1]
        last = np.arange(len(columns["request_id"])) >= start
        yield from steps_of(kept_rows(columns, ~last))
        waiting = kept_rows(columns, last)
    if waiting is not None:
        yield from steps_of(waiting)


def _batches(path: Path) -> Iterator[Columns]:
    arrow, parquet = _pyarrow()
    try:
        file = parquet.ParquetFile(path)
    except FileNotFoundError:
        return
    except (arrow.ArrowException, OSError) as error:
        raise _broken(path, error) from None
    with file:
        version = (file.schema_arrow.metadata or {}).get(_KEY)
        missing = {column.name for column in COLUMNS} - set(file.schema_arrow.names)
        if version != str(SCHEMA_VERSION).encode() or missing:
            raise ValueError(
                f"{path} is not a decision log of version {SCHEMA_VERSION}"
                f" (found {version.decode() if version else 'none'}): read it with the parlay"
                " that wrote it, or move it away"
            )
        batches = file.iter_batches(_BATCH_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except (arrow.ArrowException, OSError) as error:
                raise _broken(path, error) from None
            if batch is None:
                return
            if batch.num_rows:
                yield _columns(batch)


def _broken(path: Path, error: Exception) -> ValueError:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ValueError(f"{path} is damaged or no Parquet file, delete it or copy it again: {why}")
