"""Sweeps: what is tried, what stays, and that Ray carries the same runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sb3_contrib")

from parlay.policies.network import load_network
from parlay.sim import sweep as module
from parlay.sim.scenario import load_scenario
from parlay.sim.sweep import grid, score_of, sweep
from parlay.sim.train import Training
from parlay.sim.train_cli import _choices


def task(out: Path, **more: Any) -> Training:
    return Training("ppo", (load_scenario("chat_low").shortened(60),), 0.02, 5, out, **more)


def card(learned: float) -> dict[str, Any]:
    return {"tokens_per_s": {"a": {"none": 100.0, "learned": learned}}}


def test_a_grid_holds_every_setting_with_every_seed(tmp_path: Path) -> None:
    usual = task(tmp_path / "n", settings={"gamma": 0.3})
    found = grid(usual, {"learning_rate": [1e-3, 1e-4], "n_steps": [8.0]}, 2)
    assert [(t.seed, t.settings["learning_rate"]) for t in found] == [
        (5, 1e-3), (6, 1e-3), (5, 1e-4), (6, 1e-4),
    ]  # fmt: skip
    assert found[0].learner["gamma"] == 0.3
    assert found[0].learner["n_steps"] == 8
    assert isinstance(found[0].learner["n_steps"], int)
    assert grid(usual, {}, 1) == [usual]


def test_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ppo has no setting 'speed'; it has ent_coef"):
        task(tmp_path / "n", settings={"speed": 1.0})
    with pytest.raises(ValueError, match="learning_rate must be a number from 0"):
        task(tmp_path / "n", settings={"learning_rate": -1.0})
    assert _choices(["gamma=0.5,0.9", "n_epochs=2"]) == {"gamma": [0.5, 0.9], "n_epochs": [2.0]}
    for text in ("gamma", "gamma=much", "=", "gamma=1,"):
        with pytest.raises(ValueError, match="write KEY=NUMBER"):
            _choices([text])


def test_the_best_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {5: 120.0, 6: 150.0, 7: 90.0}

    def ended(tasks: Any, workers: int, rows: Any) -> Any:
        for number in (2, 0, 1):
            yield number, (f"network {tasks[number].seed}".encode(), card(scores[5 + number]))

    monkeypatch.setattr(module, "_on_processes", ended)
    told: list[tuple[int, float]] = []
    out = tmp_path / "n.safetensors"
    runs = sweep(grid(task(out), {}, 3), done=lambda *what: told.append(what))
    assert [run.seed for run in runs] == [6, 5, 7]
    assert out.read_bytes() == b"network 6"
    assert [number for number, _ in told] == [2, 0, 1]
    assert [score for _, score in told] == pytest.approx([0.9, 1.2, 1.5])
    written = json.loads((tmp_path / "n.safetensors.sweep.json").read_text())["runs"]
    assert [run["score"] for run in written] == pytest.approx([1.5, 1.2, 0.9])
    assert len(list(tmp_path.iterdir())) == 2


def test_the_score_is_a_geometric_mean() -> None:
    both = {"tokens_per_s": {n: {"none": 1.0, "learned": x} for n, x in (("a", 2.0), ("b", 0.5))}}
    assert score_of(both) == pytest.approx(1.0)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pip install 'parlay\[ray\]'"):
        sweep([task(tmp_path / "n")], ray="local")
    assert not list(tmp_path.iterdir())


@pytest.mark.train
def test_processes_train_what_they_are_given(tmp_path: Path) -> None:
    out = tmp_path / "n.safetensors"
    runs = sweep(grid(task(out), {"gamma": [0.2, 0.8]}, 1), workers=2, rows=64)
    best = load_network(out).card
    assert best["settings"] == dict(runs[0].settings)
    assert {run.settings["gamma"] for run in runs} == {0.2, 0.8}
    assert runs[0].score >= runs[1].score > 0.0


@pytest.mark.train
@pytest.mark.filterwarnings("ignore")
def test_ray_trains_what_processes_would(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "n.safetensors"
    quick = dataclasses.replace(task(out), minutes=1e-6)
    runs = sweep([quick, dataclasses.replace(quick, seed=6)], ray="local", rows=64)
    assert load_network(out).card["seed"] == runs[0].seed
    assert sorted(run.seed for run in runs) == [5, 6]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"no Ray cluster at '127\.0\.0\.1:1'") as error:
        sweep([task(tmp_path / "n")], ray="127.0.0.1:1")
    assert "\n" not in str(error.value)
