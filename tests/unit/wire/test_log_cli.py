"""`parlay log`: tables that line up, figures that add up, exports that lose nothing."""

from __future__ import annotations

import csv
import json
import math
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.logged import random_rows, random_step

from parlay.controller import log_cli
from parlay.controller.log import StepLog
from parlay.controller.log_cli import columns_of
from parlay.policies import cli
from parlay.policies.decision_log import DecisionLog, LogReader, log_files
from parlay.policies.log_schema import COLUMNS, Columns, in_sample, joined, kept_rows, rows_of

pytest.importorskip("pyarrow")
STEPS = 5


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("head", "stats", "export")
    points = {f"log.{n}": f"parlay.controller.log_cli:log_{n}" for n in names}
    found = EntryPoints(EntryPoint(n, v, cli.GROUP) for n, v in points.items())
    monkeypatch.setattr(cli, "entry_points", lambda group: found)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    with DecisionLog(folder) as writer:
        for columns in parts():
            writer.append(columns)
    return folder


def parts() -> list[Columns]:
    return [random_rows(seed, 3, step_id=seed) for seed in range(STEPS)]


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.run(["log", *map(str, argv)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.run(["log", *map(str, argv)]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert out == ""
    return err


def test_head_shows_the_first_rows_in_columns(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows = said(capsys, "head", log, "-n", 4).splitlines()
    rows = [row for row in rows if row.strip()]
    assert [row.split()[:2] for row in rows] == 3 * [["0", "engine"]] + [["1", "engine"]]
    ends = [head.index(name) + len(name) for name in ("step", "request", "emitted", "step ms")]
    expected = joined(parts())
    for i, row in enumerate(rows):
        cells = [row[:end].split()[-1] for end in ends]
        assert cells[1] == str(expected["request_id"][i])
        assert cells[2] == str(expected["emitted"][i])
        assert cells[3] == f"{expected['step_ms'][i]:.2f}"
    assert len(said(capsys, "head", log).split("\n")) == 1 + 10 + 2


def test_stats_add_up(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = tmp_path / "stats.json", joined(parts())
    out = said(capsys, "stats", log, "--json", path)
    found = json.loads(path.read_text())
    assert (found["steps"], found["rows"]) == (STEPS, 3 * STEPS)
    assert found["steps_by_engine"] == {"engine 0": 3, "engine 1": 2}
    assert list(found["policies"]) == [f"v{i}" for i in range(STEPS)]
    assert found["requests_ended"] == int((rows["truncated_by"] > 0).sum())
    assert sum(found["rows_by_plan_source"].values()) == 3 * STEPS
    mine = rows["policy_version"] == "v2"
    figures = found["policies"]["v2"]
    emitted, step_ms = rows["emitted"][mine].sum(), rows["step_ms"][mine][0]
    assert figures["tokens_per_s"] == pytest.approx(1e3 * emitted / step_ms)
    assert figures["accepted"] == pytest.approx(
        rows["accepted"][mine].sum() / rows["verified_k"][mine].sum()
    )
    drafts = rows["drafted_k"] > 0
    model = found["proposers"]["draft_model"]
    assert model["rows"] == int(drafts.sum())
    assert model["mean_k"] == pytest.approx(rows["drafted_k"][drafts].mean())
    assert f"{STEPS} steps of 2 engines, {3 * STEPS} rows" in out
    policies = out.split("\n\n")[1].splitlines()
    assert len({len(line.rstrip()) for line in policies}) == 1


def test_a_sample_tells_no_tokens_per_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = random_rows(3, 40)
    kept = kept_rows(columns, in_sample(columns["request_id"], 0.5))
    with DecisionLog(tmp_path) as writer:
        writer.append(kept)
    said(capsys, "stats", tmp_path, "--json", tmp_path / "s.json")
    figures = json.loads((tmp_path / "s.json").read_text())["policies"]["v3"]
    assert figures["tokens_per_s"] is None
    assert figures["rows"] == len(kept["request_id"])


def test_what_is_read_back_becomes_the_rows_it_was(log: Path) -> None:
    back = [columns_of(step) for step in LogReader(log)]
    for ours, theirs in zip(back, parts(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)
            assert ours[name].dtype.kind == values.dtype.kind


def test_a_row_that_followed_no_plan_is_exported_as_it_is(tmp_path: Path) -> None:
    view, fit, plan, outcome = random_step(1, 4)
    fit.follows[1] = False
    columns = rows_of(view, fit, plan, outcome, "e")
    with DecisionLog(tmp_path) as writer:
        writer.append(columns)
    (step,) = LogReader(tmp_path)
    for name, values in columns_of(step).items():
        np.testing.assert_array_equal(values, columns[name], err_msg=name)


def same(value: Any, logged: Any) -> bool:
    if isinstance(logged, list):
        return len(value) == len(logged) and all(map(same, value, logged))
    if isinstance(logged, float) and not math.isfinite(logged):
        return value is None
    if isinstance(logged, float):
        return bool(np.float32(value) == np.float32(logged))
    return bool(value == logged)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_export_holds_every_value(
    kind: str, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"rows.{kind}"
    assert said(capsys, "export", log, out) == f"{3 * STEPS} rows in {out}\n"
    with out.open(newline="") as file:
        rows: list[dict[str, Any]] = (
            [json.loads(line) for line in file] if kind == "jsonl" else list(csv.DictReader(file))
        )
    assert len(rows) == 3 * STEPS
    expected = joined(parts())
    for column in COLUMNS:
        values = expected[column.name].tolist()
        if column.count:
            ends = np.cumsum(expected[column.count]).tolist()
            values = [values[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        for row, logged in zip(rows, values, strict=True):
            value = row[column.name]
            if kind == "csv" and not isinstance(logged, str):
                value = None if value == "" else json.loads(value.lower())
            assert same(value, logged), (column.name, value, logged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", out.name]


def test_an_export_that_fails_leaves_nothing(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (log / "decisions-000000000001.parquet").write_bytes(log_files(log)[0].read_bytes()[:-20])
    assert "damaged" in refused(capsys, "export", log, tmp_path / "o.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("command", ["head", "stats"])
def test_what_is_no_log_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no decision log" in refused(capsys, command, tmp_path)
    assert "holds no decision log" in refused(capsys, command, tmp_path / "nowhere")
    foreign = tmp_path / "foreign"
    foreign.write_text("something else")
    assert "damaged or no Parquet file" in refused(capsys, command, foreign)


@pytest.mark.parametrize("command", ["head", "stats"])
def test_a_log_that_is_still_to_be_written_says_when(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StepLog(tmp_path, "none"):
        said = refused(capsys, command, tmp_path)
    assert "holds no decision log yet" in said
    assert "or when it ends" in said


def test_a_place_that_cannot_be_written_is_one_line(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "name it .csv or .jsonl" in refused(capsys, "export", log, tmp_path / "o.xlsx")
    assert "cannot write" in refused(capsys, "export", log, tmp_path / "no" / "o.csv")
    assert "cannot write" in refused(capsys, "stats", log, "--json", tmp_path / "no" / "o.json")


def test_a_log_is_read_as_a_stream(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = []

    class Watched(LogReader):
        def __iter__(self) -> Any:
            for step in LogReader(self.path):
                read.append(step.view.step_id)
                yield step

    monkeypatch.setattr(log_cli, "LogReader", Watched)
    said(capsys, "head", log, "-n", 3)
    assert read == [0]
