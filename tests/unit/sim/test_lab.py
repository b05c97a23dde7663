"""`parlay lab`: what it is asked for and what it writes; test_recorded.py runs whole cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parlay.policies.cli import run as parlay
from parlay.sim import lab
from parlay.sim.counterfactual import TracedRequest
from parlay.sim.lab import HOSTILE, recording


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--sets", "mixed,easy"], "--sets must be of mixed and hostile"),
        (["--batch", "1,2"], "--batch must be of 1, 4, 16, 64"),
        (["--batch", "1,many"], "--batch must be of 1, 4, 16, 64"),
        (["--policy", "pilott"], "pilott"),
        (["--costs", "a_guess"], "a_guess"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parlay(["lab", *asked]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_where_no_draft_holds_speculation_loses_to_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few: list[TracedRequest] = recording(HOSTILE)[:6]
    monkeypatch.setattr(lab, "recording", lambda name: few)
    out = tmp_path / "lab.json"
    asked = ["--policy", "none,fixed:proposer=draft_model/k=4", "--sets", HOSTILE]
    asked += ["--costs", "cpu_smollm", "--batch", "1", "--seeds", "2", "--json", str(out)]
    assert parlay(["lab", *asked]) == 0
    none, fixed = json.loads(out.read_text())["rows"]
    assert (none["policy"], none["against"], none["batch"]) == ("none", "none", 1)
    assert none["ratio"] == none["low"] == 1.0
    assert 0.0 < fixed["low"] <= fixed["ratio"] < 0.9
