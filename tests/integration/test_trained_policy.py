"""Train, export, serve, decode: a policy made in the simulator steers the real engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("sb3_contrib")

from tests.tiny import CONFIG, tiny_backend

from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.request import SamplingParams
from parlay.engine.step import Engine
from parlay.policies.policy import make_policy
from parlay.policies.types import PlanSource
from parlay.sim.scenario import load_scenario
from parlay.sim.train import Training, train

PROMPTS = [[1, 2, 3, 0, 1, 2, 3, 0], [2, 2, 1, 0, 2, 2], [3, 1, 0, 1, 3, 1, 0]]


@contextmanager
def served(network: Path, socket: Path) -> Iterator[str]:
    """Run `parlay serve` with a trained policy that draws its actions, so that it drafts at all."""
    command = [sys.executable, "-m", "parlay.controller", "--listen", f"unix:{socket}"]
    command += ["--policy", str(network), "--set", "sample=true"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert network.name in ready, process.communicate(timeout=30)
        yield f"unix:{socket}"
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert "Traceback" not in errors


def decoded(planner: Planner) -> tuple[list[list[int]], int, int]:
    """Return what the tiny engine writes, the tokens it drafted, and rows steered from afar."""
    engine = Engine(tiny_backend(), planner, CONFIG)
    requests = [engine.add(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS]
    drafted = afar = 0
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        drafted += int(outcome.drafted_k.sum())
        afar += int((outcome.plan_source == PlanSource.REMOTE).sum())
    planner.close()
    return [request.output for request in requests], drafted, afar


@pytest.mark.train
@pytest.mark.parametrize("algorithm", ["ppo", "recurrent_ppo"])
def test_the_engine_decodes_under_what_was_trained(tmp_path: Path, algorithm: str) -> None:
    network = tmp_path / "n.safetensors"
    scenario = load_scenario("chat_low").shortened(60)
    train(Training(algorithm, (scenario,), 0.02, 0, network), rows=64)
    plain, _, _ = decoded(LocalPlanner(make_policy("none")))
    with served(network, tmp_path / "s.sock") as target:
        info = EngineInfo("tiny", tiny_backend().limits())
        fallback = LocalPlanner(make_policy("none"))
        steered, drafted, afar = decoded(RemotePlanner(target, info, fallback, synchronous=True))
    assert afar > 40
    assert drafted > 20
    assert steered == plain
