"""Training: what comes out runs, a killed run goes on, a teacher can be copied."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sb3_contrib")

import torch
from torch import nn
from typer.testing import CliRunner

from parlay.policies.features import ACTION_NAMES, FEATURES, K_OF, PROPOSER_OF
from parlay.policies.network import load_network, save_network
from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, NONE
from parlay.sim import train as training
from parlay.sim.clone import clone, nearest_actions, recorded
from parlay.sim.env import SlotVecEnv
from parlay.sim.episode import run_episode
from parlay.sim.export import network_of
from parlay.sim.kinds import kinds_of
from parlay.sim.load import arrivals_of
from parlay.sim.scenario import load_scenario
from parlay.sim.train import Training, make_model, train


def task(
    out: Path, algorithm: str = "maskable_ppo", minutes: float = 0.04, **more: Any
) -> Training:
    scenario = load_scenario("chat_low").shortened(60)
    return Training(algorithm, (scenario,), minutes, 0, out, **more)


def test_what_cannot_be_trained_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no algorithm 'sac'"):
        task(tmp_path / "n", "sac")
    with pytest.raises(ValueError, match="minutes must be above 0"):
        task(tmp_path / "n", minutes=0.0)
    for algorithm in ("dqn", "recurrent_ppo"):
        with pytest.raises(ValueError, match=f"{algorithm} cannot begin as a clone"):
            task(tmp_path / "n", algorithm, clone=True)
    with pytest.raises(ValueError, match=r"cannot write .*folder that can be written"):
        task(tmp_path / "missing" / "n")
    with pytest.raises(ValueError, match="nothing to resume"):
        train(task(tmp_path / "n"), resume=True)


@pytest.mark.parametrize("algorithm", ["ppo", "maskable_ppo", "dqn"])
def test_the_exported_network_says_what_the_learner_says(tmp_path: Path, algorithm: str) -> None:
    job = task(tmp_path / "n", algorithm)
    env = SlotVecEnv(kinds_of(job.scenarios[0], 0) * 2, seed=1)
    for module in make_model(job, env).policy.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
    model = make_model(job, env)
    network = network_of(model, env.scaler, {})
    seen = env.reset()
    logits = network.logits(seen)
    assert logits.shape == (4, len(ACTION_NAMES))
    action, _ = model.predict(seen, deterministic=True)
    np.testing.assert_array_equal(action, logits.argmax(axis=1))


def test_the_exported_memory_is_the_learners(tmp_path: Path) -> None:
    job = task(tmp_path / "n", "recurrent_ppo")
    env = SlotVecEnv(kinds_of(job.scenarios[0], 0) * 3, seed=1, ends=True)
    model = make_model(job, env)
    for name, weights in model.policy.named_parameters():
        nn.init.normal_(weights, std=0.3 if "weight" in name else 0.1)
    save_network(job.out, network_of(model, env.scaler, {}))
    network = load_network(job.out)
    assert network.lstm is not None
    starts, states, ended = np.ones(6, bool), None, 0
    seen: Any = env.reset()
    memory = np.zeros((2, 6, network.lstm.size), np.float32)
    for _ in range(80):
        memory[:, starts] = 0.0
        logits, memory = network.recall(seen, memory)
        action, states = model.predict(seen, states, starts, deterministic=True)
        np.testing.assert_array_equal(action, logits.argmax(axis=1))
        assert states is not None
        np.testing.assert_allclose(memory[0], states[0][0], atol=1e-5)
        before = env.loop.length - env.loop.output
        seen, _, starts, _ = env.step(action)
        # A request that ends is an episode that ends, and no other.
        assert (before[starts] <= 9).all()
        ended += int(starts.sum())
    assert ended > 0


def test_a_teachers_action_becomes_the_nearest_that_may_be_done() -> None:
    may = np.ones((5, len(ACTION_NAMES)), bool)
    may[4, PROPOSER_OF == NGRAM] = False
    who = np.array([NONE, DRAFT_MODEL, MEDUSA, DRAFT_MODEL, NGRAM])
    action = nearest_actions(who, np.array([0, 4, 7, 12, 3]), may)
    assert [(int(PROPOSER_OF[a]), int(K_OF[a])) for a in action] == [
        (NONE, 0),
        (DRAFT_MODEL, 3),
        (MEDUSA, 4),
        (DRAFT_MODEL, 8),
        (NONE, 0),
    ]


@pytest.mark.slow
def test_a_teacher_can_be_copied() -> None:
    seen, may, did = recorded([load_scenario("mixed")], steps=120, seed=1)
    assert seen.shape == (len(did), len(FEATURES))
    assert may[np.arange(len(did)), did].all()
    torch.manual_seed(0)
    layers = [nn.Linear(len(FEATURES), 64), nn.Tanh(), nn.Linear(64, len(ACTION_NAMES))]
    usual = np.bincount(did).max() / len(did)
    half = len(did) // 2
    assert clone(layers, seen[:half], may[:half], did[:half], seed=0) > usual + 0.1


@pytest.mark.train
@pytest.mark.parametrize("algorithm", training.ALGORITHMS)
def test_what_was_trained_for_seconds_runs_an_episode(tmp_path: Path, algorithm: str) -> None:
    told: list[tuple[float, int, float]] = []
    job = task(tmp_path / "n.safetensors", algorithm)
    card = train(job, progress=lambda *what: told.append(what), rows=64)
    assert told[-1][1] > 0
    assert card["row_steps"] > 0
    assert set(card["tokens_per_s"]["chat_low"]) == {"none", "goodput", "pilot", "learned"}
    assert load_network(job.out).card == card
    scenario = load_scenario("mixed").shortened(100)
    episode = run_episode(
        scenario,
        lambda limits, _: make_policy("learned", {"path": str(job.out)}, limits),
        arrivals_of(scenario),
        seed=1,
    )
    assert episode.tokens > 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "n.safetensors",
        "n.safetensors.ckpt",
    ]


@pytest.mark.train
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_S", 0.0)

    def killed(share: float, row_steps: int, _: float) -> None:
        if row_steps > 3000:
            raise KeyboardInterrupt

    job = task(tmp_path / "n.safetensors", minutes=1.0)
    with pytest.raises(KeyboardInterrupt):
        train(job, progress=killed, rows=64)
    assert not job.out.exists()
    before = torch.load(job.checkpoint, weights_only=True)
    assert before["row_steps"] > 2000
    spent = before["spent_s"] / 60.0
    again = dataclasses.replace(job, minutes=spent + 0.03)
    card = train(again, resume=True, rows=64)
    assert card["row_steps"] > before["row_steps"]
    assert card["minutes"] >= round(spent, 2)
    after = torch.load(job.checkpoint, weights_only=True)
    assert after["starts"] == 2
    torch.testing.assert_close(after["centre"], before["centre"])
    with pytest.raises(ValueError, match="another algorithm"):
        train(task(job.out, "ppo"), resume=True)
    job.checkpoint.write_bytes(b"PK" + job.checkpoint.read_bytes()[:500])
    with pytest.raises(ValueError, match="damaged"):
        train(again, resume=True)


@pytest.mark.train
def test_a_run_killed_at_once_resumes(tmp_path: Path) -> None:
    out = tmp_path / "n.safetensors"
    job = task(out, minutes=5.0)
    code = (
        "import sys; from pathlib import Path; from parlay.sim import train as t;"
        "from parlay.sim.scenario import load_scenario as load;"
        "t.CHECKPOINT_S = 0.0; s = load('chat_low').shortened(60);"
        "t.train(t.Training('maskable_ppo', (s,), 5.0, 0, Path(sys.argv[1])), rows=64)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(out)])
    try:
        while not job.checkpoint.exists():
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    before = torch.load(job.checkpoint, weights_only=True)
    card = train(
        dataclasses.replace(job, minutes=before["spent_s"] / 60.0 + 0.02), resume=True, rows=64
    )
    assert card["row_steps"] > before["row_steps"] > 0
    assert load_network(out).card == card


@pytest.mark.train
def test_the_command_line_trains(tmp_path: Path) -> None:
    import typer

    from parlay.sim.train_cli import train as command

    app = typer.Typer()
    app.command()(command)
    out = tmp_path / "n.safetensors"
    asked = ["ppo", "--scenario", "chat_low", "--minutes", "0.02", "--out", str(out), "--clone"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "chat_low" in done.output
    assert load_network(out).card["cloned"] is True
