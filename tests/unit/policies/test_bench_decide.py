"""`parlay bench decide`: its report's keys, its table, and traffic worth measuring on."""

from __future__ import annotations

import gc
import json
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest

from parlay.policies import bench_decide, cli
from parlay.policies.bench_decide import REQUESTS
from parlay.policies.policy import make_policy, registry
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import Proposer

KEYS = {"policy", "requests", "p50_us", "p99_us", "fit_p50_us", "observe_p50_us"}


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    project = Path(__file__).parents[3] / "pyproject.toml"
    points = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
    found = EntryPoints(EntryPoint(n, v, cli.GROUP) for n, v in points[cli.GROUP].items())
    monkeypatch.setattr(cli, "entry_points", lambda group: found)
    monkeypatch.setattr(bench_decide, "WARM_UP_STEPS", 1)


def test_every_policy_at_every_size_with_the_pinned_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "decide.json"
    assert cli.run(["bench", "decide", "--steps", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert set(report) == {"rows"}
    cells = {(row["policy"], row["requests"]) for row in report["rows"]}
    assert cells == {(name, n) for name in registry() for n in (1, 32, 256)}
    for row in report["rows"]:
        assert set(row) == KEYS
        assert row["p99_us"] >= row["p50_us"] > 0.0
        assert row["fit_p50_us"] > 0.0
        assert row["observe_p50_us"] > 0.0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(report["rows"])
    assert len({len(line) for line in lines}) == 1, "the table is aligned"


def test_one_policy_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "decide", "--policy", "fixed", "--steps", "2"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["fixed"] * 3


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy", "zap"], "unknown policy 'zap'"),
        (["--steps", "0"], "--steps must be 1 or more"),
    ],
)
def test_what_it_cannot_do_is_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "decide", *argv]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_the_bar_is_for_a_terminal_and_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    made = [("fixed", n) for n in REQUESTS]
    assert list(bench_decide._progress(made, shown=True)) == made
    shown = capsys.readouterr().err
    assert "fixed, 32 requests" in shown
    assert shown.split("\r")[-2].isspace()
    assert list(bench_decide._progress(made, shown=False)) == made
    assert capsys.readouterr().err == ""


def test_traffic_mixes_tasks_matches_and_lags_and_goes_on() -> None:
    history, policy = History(32), make_policy("ngram_gate", {}, LIMITS)
    seen, drafted, prompts, shadows = set(), np.zeros(len(Proposer)), 0, 0
    for step in range(120):
        view = history.view()
        assert view.step_id == step
        if step == 0:
            assert len(set(view.task.tolist())) == 4
            assert len(set(view.draft_kv_lag.tolist())) > 5
            assert len(set(view.match_tokens.tolist())) > 3
        outcome = history.step(policy.decide(view))
        assert (outcome.accepted <= outcome.verified_k).all()
        assert (outcome.verified_k <= view.max_k).all()
        seen |= set(view.request_id.tolist())
        drafted += np.bincount(outcome.proposer, outcome.drafted_k, minlength=len(Proposer))
        prompts += int(view.prefill_tokens.any())
        shadows += len(outcome.shadow)
    assert len(seen) > 64, "requests end and others follow"
    assert drafted[Proposer.NGRAM] > 0
    assert drafted[Proposer.DRAFT_MODEL] > 0
    assert prompts > 0
    assert shadows > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pilot", "linucb"])
def test_a_hundred_thousand_steps_leave_nothing_behind(name: str) -> None:
    policy, history = make_policy(name, None, LIMITS), History(4)
    held = []
    for steps in (20_000, 80_000):
        for _ in range(steps):
            plan = policy.decide(history.view())
            policy.observe(history.step(plan))
        gc.collect()
        size = sum(np.asarray(value).nbytes for value in policy.state().values())
        held.append((sys.getallocatedblocks(), size))
    (blocks, size), (more_blocks, more_size) = held
    # A table grows by the requests of its last few hundred steps, as many at one time as another.
    assert more_size < 1.2 * size
    assert more_blocks < blocks + 500
