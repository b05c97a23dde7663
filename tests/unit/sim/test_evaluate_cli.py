"""`parlay evaluate`: estimates with their intervals, refusals with their reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.coupled import Exploring, K, run
from tests.unit.policies.logged import random_rows

from parlay.controller.log_cli import columns_of
from parlay.policies import cli
from parlay.policies.decision_log import DecisionLog, LogReader
from parlay.policies.log_schema import in_sample, kept_rows
from parlay.policies.policy import EngineLimits, Policy, make_policy
from parlay.sim import evaluate_cli
from parlay.sim.evaluate_cli import Seen

pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("evaluate", "parlay.sim.evaluate_cli:evaluate", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: EntryPoints([point]))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    with DecisionLog(folder) as writer:
        for step in run(Exploring(1), 120, 1):
            writer.append(columns_of(step))
    return folder


def test_estimates_stand_beside_the_log_and_refusals_say_why(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    drafts, deep = "fixed:proposer=draft_model/k=3", "fixed:proposer=medusa/k=3"
    argv = ["--policy", drafts, "--policy", "none", "--policy", deep, "--json", str(path)]
    assert cli.run(["evaluate", str(log), *argv]) == 0
    out = capsys.readouterr().out
    found = {(one["policy"], one["estimator"]): one for one in json.loads(path.read_text())}
    assert len(found) == 9
    emitted, step_ms = 0, 0.0
    for step in LogReader(log):
        emitted += int(step.outcome.emitted.sum())
        step_ms += step.outcome.step_ms
    logged = 1e3 * emitted / step_ms
    assert f"the log's own policy: {logged:,.0f} tokens/s over 120 steps" in out
    for policy in (drafts, "none"):
        one = found[policy, "replay"]["estimate"]
        assert one["low"] < one["goodput"] < one["high"]
        assert one["logged_goodput"] == pytest.approx(logged)
        assert f"{one['goodput'] / logged:.3f}x" in out
        assert f"{one['effective_requests']:,.0f}" in out
    table = out.split("\n\n")[1].splitlines()
    rows = [line for line in table if "refused" not in line]
    assert len({len(line.rstrip()) for line in rows}) == 1
    for (policy, estimator), one in found.items():
        assert (one["estimate"] is None) == bool(one["refused"])
        assert (f"{policy}, {estimator}: refused, {one['refused']}" in out) == bool(one["refused"])


def test_the_status_is_one_where_nothing_could_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DecisionLog(tmp_path) as writer:
        for step in run(Exploring(2), 3, 2)[:3]:
            writer.append(columns_of(step))
    assert cli.run(["evaluate", str(tmp_path), "--policy", "none"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(": refused, the log " in line for line in lines)


def test_a_policy_that_draws_is_replayed_from_several_seeds(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def watched(name: str, settings: Mapping[str, Any], limits: EngineLimits) -> Policy:
        made.append(settings.get("seed"))
        return make_policy(name, settings, limits)

    monkeypatch.setattr(evaluate_cli, "make_policy", watched)
    cli.run(["evaluate", str(log), "--policy", "exp3_spec"])
    assert made == [0, 0, 1, 2]
    made.clear()
    cli.run(["evaluate", str(log), "--policy", "exp3_spec:seed=5"])
    assert made == ["5", "5"]


def test_limits_are_what_the_log_shows(log: Path) -> None:
    seen = Seen()
    steps = list(seen.watch(LogReader(log)))
    limits = seen.limits()
    assert limits.k_max == max(K, int(max(step.view.max_k.max() for step in steps)))
    assert limits.proposer_mask == 1 | int(
        np.bitwise_or.reduce(np.concatenate([step.view.proposer_mask for step in steps]))
    )
    assert limits.bucket_edges == ()


def test_what_cannot_be_is_one_line(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = tmp_path / "sample"
    with DecisionLog(sample) as writer:
        columns = random_rows(1, 30)
        writer.append(kept_rows(columns, in_sample(columns["request_id"], 0.5)))
    for argv, text in [
        ((str(log), "--policy", "best"), "unknown policy 'best'"),
        ((str(log), "--policy", "none:k=3"), "no setting 'k'"),
        ((str(log), "--policy", "fixed:k"), "name:key=value"),
        ((str(log), "--policy", "none", "--json", f"{tmp_path}/no/f"), "cannot write"),
        ((str(tmp_path), "--policy", "none"), "holds no decision log"),
        ((str(sample), "--policy", "none"), "sample_rate 1"),
    ]:
        assert cli.run(["evaluate", *argv]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert text in err
        assert err.count("\n") == 1


def test_a_truncated_log_is_one_line_and_nothing_is_written(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = next(iter(sorted(log.glob("*.parquet"))))
    data = whole.read_bytes()
    (cut / whole.name).write_bytes(data[: len(data) // 2])
    out = tmp_path / "out.json"
    assert cli.run(["evaluate", str(cut), "--policy", "none", "--json", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert whole.name in printed.err
    assert printed.err.count("\n") == 1
    assert not out.exists()
