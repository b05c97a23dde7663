"""The audit trail: whole lines, bounded files, and no call that fails for it."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from parlay.controller.audit import FILES, MOST_TEXT, Audit


def at() -> datetime:
    return datetime(2001, 2, 3, tzinfo=UTC)


def test_an_entry_says_who_did_what_when_why_and_what_came_of_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, clock=at)
    audit.write({"peer": "unix:", "says": "a\nb"}, "activate", {"policy": "none"}, "slow", "done")
    audit.write({"peer": "controller"}, "roll back", {"policy": "x"}, "raised")
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "when": "2001-02-03T00:00:00.000+00:00",
        "who": {"peer": "unix:", "says": "a\nb"},
        "what": "activate",
        "of": {"policy": "none"},
        "why": "slow",
        "outcome": "done",
    }
    assert second["who"] == {"peer": "controller"}


def test_a_full_file_is_set_aside_and_the_oldest_dropped(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, most_bytes=600)
    for number in range(60):
        audit.write({}, "act", {"number": number})
    files = sorted(tmp_path.iterdir())
    assert len(files) == FILES
    assert all(file.stat().st_size <= 600 for file in files)
    kept = [
        json.loads(line)["of"]["number"]
        for number in range(FILES - 1, -1, -1)
        for line in path.with_name(f"{path.name}.{number}" if number else path.name)
        .read_text()
        .splitlines()
    ]
    assert kept == list(range(kept[0], 60))


def test_another_process_goes_on_with_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        Audit(path).write({}, "act", {})
    assert len(path.read_text().splitlines()) == 2


def test_what_cannot_be_written_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit(tmp_path / "none" / "audit.jsonl")
    with caplog.at_level(logging.ERROR, "parlay.controller"):
        audit.write({"peer": "me"}, "activate", {"policy": "none"})
    assert audit.failed_writes == 1
    assert '"activate"' in caplog.text
    (tmp_path / "none").mkdir()
    audit.write({}, "act", {})
    assert audit.failed_writes == 1


def test_long_texts_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    text = "x" * 10_000
    Audit(path).write({"says": text}, "act", {"settings": {text: text}}, text, text)
    assert path.stat().st_size < 6 * MOST_TEXT
