"""Files that commands write."""

import json
from pathlib import Path

import pytest

from parlay.policies.files import check_writable, write_json, write_whole


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"rows": [{"x": float("nan"), "ci": (1.0, float("nan"))}, 2]})
    assert json.loads(path.read_text()) == {"rows": [{"x": None, "ci": [1.0, None]}, 2]}


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fill(file: object) -> None:
        file.write("new")  # type: ignore[attr-defined]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_whole(path, fill)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_a_file_is_said_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "a")
    for path in (tmp_path, tmp_path / "no" / "a"):
        with pytest.raises(ValueError, match="cannot write"):
            check_writable(path)
