"""The decision log on disk: rotation, bounds, crashes, and what is read back."""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.logged import assert_same_steps, random_rows

from parlay.policies import decision_log
from parlay.policies.decision_log import DecisionLog, LogReader, LogSettings, log_files
from parlay.policies.log_schema import LoggedStep, in_sample, joined, steps_of

pytest.importorskip("pyarrow")


def steps(count: int) -> tuple[list[Any], list[LoggedStep]]:
    parts = [random_rows(seed, 1 + seed % 5, step_id=seed) for seed in range(count)]
    return parts, list(steps_of(joined(parts)))


def test_what_is_written_is_read_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "_BATCH_ROWS", 7)  # so that steps straddle batches
    parts, expected = steps(40)
    with DecisionLog(tmp_path, LogSettings(file_bytes=10_000)) as log:
        for part in parts:
            log.append(part)
    assert len(log_files(tmp_path)) > 2
    reader = LogReader(tmp_path)
    for _ in range(2):
        assert_same_steps(expected, list(reader))
    first = list(LogReader(log_files(tmp_path)[0]))
    assert_same_steps(first, expected[: len(first)])


def test_a_file_is_written_when_it_is_large_or_old(tmp_path: Path) -> None:
    now_s = 0.0
    log = DecisionLog(tmp_path, LogSettings(file_age_s=10.0), clock_s=lambda: now_s)
    rows = random_rows(1)
    log.append(rows)
    now_s = 9.9
    log.append(random_rows(2))
    assert not log_files(tmp_path)
    now_s = 10.0
    log.append(random_rows(3))
    assert len(log_files(tmp_path)) == 1
    size = sum(values.nbytes for values in rows.values())
    log = DecisionLog(tmp_path, LogSettings(file_bytes=size))
    log.append(rows)
    assert len(log_files(tmp_path)) == 2
    log.flush()
    assert len(log_files(tmp_path)) == 2


def test_the_oldest_files_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    parts, expected = steps(8)
    with DecisionLog(tmp_path) as log:
        log.append(parts[0])
    size = log_files(tmp_path)[0].stat().st_size
    log = DecisionLog(tmp_path, LogSettings(total_bytes=4 * size))
    for part in parts[1:]:
        log.append(part)
        log.flush()
    files = log_files(tmp_path)
    assert 2 <= len(files) < 8
    assert sum(path.stat().st_size for path in files) <= 4 * size
    assert_same_steps(list(LogReader(tmp_path)), expected[-len(files) :])
    small = DecisionLog(tmp_path, LogSettings(total_bytes=1))
    small.append(parts[0])
    small.flush()
    assert_same_steps(list(LogReader(tmp_path)), expected[:1])


def test_a_crash_loses_only_what_was_not_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, expected = steps(3)
    log = DecisionLog(tmp_path)
    log.append(parts[0])
    log.flush()
    log.append(parts[1])

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log.flush()
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    assert_same_steps(list(LogReader(tmp_path)), expected[:1])
    with DecisionLog(tmp_path) as log:
        assert len(list(tmp_path.iterdir())) == 1
        log.append(parts[2])
    assert_same_steps(list(LogReader(tmp_path)), [expected[0], expected[2]])


def test_a_full_disk_is_reported_and_the_next_flush_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, expected = steps(2)
    log = DecisionLog(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    log.append(parts[0])
    with pytest.raises(OSError, match="No space"):
        log.flush()
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    log.append(parts[1])
    log.close()
    assert_same_steps(list(LogReader(tmp_path)), expected[1:])


def test_a_sample_holds_whole_requests(tmp_path: Path) -> None:
    parts = [random_rows(seed, 8, step_id=seed, first=1 + seed // 4) for seed in range(40)]
    with DecisionLog(tmp_path, LogSettings(sample_rate=0.5)) as log:
        for part in parts:
            log.append(part)
    everyone = np.concatenate([part["request_id"] for part in parts])
    kept = np.concatenate([step.view.request_id for step in LogReader(tmp_path)])
    np.testing.assert_array_equal(kept, everyone[in_sample(everyone, 0.5)])
    assert 0 < len(kept) < len(everyone)
    assert {step.rows_in_step for step in LogReader(tmp_path)} == {8}


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    with DecisionLog(tmp_path) as log:
        log.append(random_rows(1))
    (path,) = log_files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ValueError, match=rf"{path.name} is damaged or no Parquet file") as error:
        list(LogReader(tmp_path))
    assert "\n" not in str(error.value)


def test_damage_inside_a_file_is_named(tmp_path: Path) -> None:
    with DecisionLog(tmp_path) as log:
        log.append(random_rows(1))
    (path,) = log_files(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[4:600] = b"\xff" * 596
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged"):
        list(LogReader(tmp_path))


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    path = tmp_path / "decisions-000000000000.parquet"
    parquet.write_table(arrow.table({"a": [1]}), path)
    with pytest.raises(ValueError, match=rf"{path.name} is not a decision log of version 1"):
        list(LogReader(tmp_path))
    path.rename(tmp_path / "decisions-old.parquet")
    with pytest.raises(ValueError, match="not named like a file of the decision log"):
        list(LogReader(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="holds no decision log"):
            list(LogReader(path))


def test_a_file_deleted_while_reading_is_passed_over(tmp_path: Path) -> None:
    parts, expected = steps(3)
    log = DecisionLog(tmp_path)
    for part in parts:
        log.append(part)
        log.flush()
    found = iter(LogReader(tmp_path))
    first = next(found)
    log_files(tmp_path)[1].unlink()
    assert_same_steps([first, *found], [expected[0], expected[2]])


def test_without_pyarrow_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        DecisionLog(tmp_path)


@pytest.mark.parametrize(
    "setting", [{"sample_rate": 1.5}, {"file_bytes": 0}, {"file_age_s": -1.0}, {"total_bytes": 0}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"decision log: {next(iter(setting))} must be"):
        LogSettings(**setting)


def test_reading_holds_some_thousand_rows_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "_BATCH_ROWS", 16)
    parts, _ = steps(60)
    with DecisionLog(tmp_path) as log:
        for part in parts:
            log.append(part)
    held = []
    sliced = steps_of

    def watched(columns: Any) -> Any:
        held.append(len(columns["request_id"]))
        return sliced(columns)

    monkeypatch.setattr(decision_log, "steps_of", watched)
    assert sum(1 for _ in itertools.islice(LogReader(tmp_path), 30)) == 30
    assert max(held) < 16 + 5
