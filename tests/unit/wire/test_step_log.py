"""The thread that writes the decision log: bounds, trouble with the disk, one writer a folder."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlay.controller import log as log_module
from parlay.controller.heard import HeardStep, heard_rows
from parlay.controller.log import StepLog
from parlay.policies.decision_log import DecisionLog, LogReader, LogSettings, log_files
from parlay.policies.log_schema import Columns
from parlay.policies.synthetic import History
from parlay.policies.types import PlanSource

pytest.importorskip("pyarrow")
ALL_AT_ONCE = LogSettings(file_bytes=1)
"""A file for each step."""


def heard(count: int, first: int = 0) -> list[HeardStep]:
    history, steps = History(2), []
    for step_id in range(first, first + count):
        view = history.view()
        view = dataclasses.replace(view, step_id=step_id)
        outcome = dataclasses.replace(history.step(None, PlanSource.REMOTE), step_id=step_id)
        steps.append(HeardStep("e", view, None, outcome))
    return steps


def step_ids(folder: Path) -> list[int]:
    return [step.view.step_id for step in LogReader(folder)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_what_is_put_is_written_when_idle_and_at_the_end(tmp_path: Path) -> None:
    with StepLog(tmp_path, "mine", idle_s=0.02) as log:
        for step in heard(3):
            log.put(step)
        wait_for(lambda: bool(log_files(tmp_path)))
        wait_for(lambda: step_ids(tmp_path) == [0, 1, 2])
        for step in heard(2, first=3):
            log.put(step)
    assert step_ids(tmp_path) == [0, 1, 2, 3, 4]
    assert log.counts.taken_steps == 5
    assert log.counts.dropped_steps == 0


def test_a_full_queue_drops_its_oldest_and_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, begun = threading.Event(), threading.Event()

    def slow(step: HeardStep, policy: str) -> Columns:
        begun.set()
        assert go.wait(20.0)
        return heard_rows(step, policy)

    monkeypatch.setattr(log_module, "heard_rows", slow)
    with StepLog(tmp_path, "mine", queue_steps=4) as log:
        steps = heard(11)
        log.put(steps[0])
        assert begun.wait(20.0)
        start_s = time.monotonic()
        for step in steps[1:]:
            log.put(step)
        assert time.monotonic() - start_s < 1.0
        go.set()
    assert step_ids(tmp_path) == [0, 7, 8, 9, 10]
    assert log.counts.dropped_steps == 6
    assert "dropped_steps=6" in caplog.text


def test_a_full_disk_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_module, "RETRY_S", 0.0)
    full, flush = True, DecisionLog.flush

    def flush_or_fail(self: DecisionLog) -> None:
        if full:
            self._parts = []
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(self)

    monkeypatch.setattr(DecisionLog, "flush", flush_or_fail)
    caplog.set_level(logging.WARNING)
    with StepLog(tmp_path, "mine", ALL_AT_ONCE, idle_s=0.01) as log:
        for step in heard(5):
            log.put(step)
        wait_for(lambda: log.counts.failed_writes >= 5)
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "No space left" in caplog.text
        assert "decisions go on" in caplog.text
        full = False
        for step in heard(3, first=5):
            log.put(step)
    assert step_ids(tmp_path) == [5, 6, 7]
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 3
    assert "written again" in messages[1]
    assert "gaps" in messages[2]


def test_a_folder_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with StepLog(folder, "mine", ALL_AT_ONCE) as log:
        first, second, third = heard(3)
        folder.rmdir()
        log.put(first)
        wait_for(lambda: log.counts.failed_writes == 1)
        log.put(second)
        log.put(third)
    assert step_ids(folder) == [1, 2]


def test_steps_that_make_no_rows_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = heard(2)
    bad.outcome.request_id = bad.outcome.request_id + np.uint64(9)
    with StepLog(tmp_path, "mine") as log:
        for step in (bad, good, bad):
            log.put(step)
    assert step_ids(tmp_path) == [0]
    assert log.counts.unusable_steps == 2
    assert caplog.text.count("step left out") == 1


def test_a_run_that_begins_again_is_another_step(tmp_path: Path) -> None:
    with StepLog(tmp_path, "mine") as log:
        for step in heard(1) * 2:
            log.put(step)
    assert [(s.view.step_id, len(s.view)) for s in LogReader(tmp_path)] == [(0, 2), (0, 2)]


def test_one_writer_a_folder(tmp_path: Path) -> None:
    with (
        StepLog(tmp_path, "mine"),
        pytest.raises(OSError, match="another process does"),
    ):
        StepLog(tmp_path, "mine")
    StepLog(tmp_path, "mine").close()


@pytest.mark.parametrize("below", ["file", "file/log"])
def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"cannot write the decision log into .*: (Not a|File)"):
        StepLog(tmp_path / below, "mine")
    (tmp_path / "decisions-old.parquet").write_text("mine")
    with pytest.raises(ValueError, match="move it away"):
        StepLog(tmp_path, "mine")
    (tmp_path / "decisions-old.parquet").unlink()
    StepLog(tmp_path, "mine").close()


def test_a_silent_disk_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    def hang(self: Any) -> None:
        go.wait(20.0)

    monkeypatch.setattr(DecisionLog, "flush", hang)
    monkeypatch.setattr(log_module, "CLOSE_S", 0.05)
    log = StepLog(tmp_path, "mine", ALL_AT_ONCE)
    log.put(heard(1)[0])
    start_s = time.monotonic()
    log.close()
    assert time.monotonic() - start_s < 5.0
    assert "silent" in caplog.text
    go.set()
    log._thread.join(20.0)
