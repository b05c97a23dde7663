"""Whatever becomes of the sidecar in mid-run, output stays the same and no request is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.request import Request, SamplingParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.policy import make_policy

WAIT_S = 30.0
CONFIG = EngineConfig(max_running=8, token_budget=64, target_blocks=128, draft_blocks=1)
TINY = ModelConfig(
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=40,
    rope_theta=10000.0,
    norm_eps=1e-5,
    context=256,
    tied=True,
    eos_ids=(),
)


@pytest.fixture(scope="module")
def model() -> Llama:
    source = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=source) * (1.0 if len(shape) == 1 else 0.15)
        for name, shape in TINY.tensor_shapes().items()
    }
    embedding = weights["model.embed_tokens.weight"]
    return Llama(TINY, weights, embedding, torch.float32, torch.device("cpu"))


class Service:
    """A sidecar that can be started, killed and frozen; only ever by its own id."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "parlay.controller", "--listen", self.target]
        command += ["--policy", "fixed", "--set", "proposer=ngram", "--set", "k=4"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "serving on" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="parlay-") as folder:
        running = Service(f"unix:{Path(folder, 'sidecar.sock')}")
        yield running
        running.kill()


def make(model: Llama, planner: Planner) -> tuple[Engine, list[Request]]:
    """Return an engine with greedy and coupled requests waiting."""
    engine = Engine(TorchBackend(model, None, CONFIG, k_max=8), planner, CONFIG)
    requests = []
    for i in range(12):
        prompt = [(i + 3 * j) % TINY.vocab for j in range(5 + i)] * 2
        sampling = SamplingParams(
            temperature=0.9 if i % 2 else 0.0, seed=i if i % 2 else None, max_tokens=60
        )
        requests.append(engine.add(prompt, sampling))
    return engine, requests


def steps(engine: Engine, count: int, pace_s: float = 0.0) -> None:
    for _ in range(count):
        if engine.has_work:
            engine.step()
            time.sleep(pace_s)


def test_faults_of_the_sidecar_change_no_output_and_lose_no_request(
    model: Llama, service: Service
) -> None:
    engine, plain = make(model, LocalPlanner(make_policy("none")))
    steps(engine, 10_000)
    limits = engine.backend.limits()
    fallback = LocalPlanner(make_policy("ngram_gate", None, limits))
    planner = RemotePlanner(service.target, EngineInfo("engine", limits), fallback)
    with contextlib.closing(planner):
        engine, requests = make(model, planner)
        _await_plan(engine, planner)
        service.kill()
        steps(engine, 25, 0.005)
        assert planner.stats.plans_local > 0
        service.start()
        _await_plan(engine, planner)
        service.freeze()
        steps(engine, 25, 0.005)
        service.thaw()
        steps(engine, 10_000)
    assert all(r.finished for r in requests)
    assert [r.output for r in requests] == [r.output for r in plain]
    assert sum(r.accepted for r in requests) > 0


def _await_plan(engine: Engine, planner: RemotePlanner) -> None:
    """Step until the sidecar has steered one more step."""
    before, deadline_s = planner.stats.plans_remote, time.monotonic() + WAIT_S
    while planner.stats.plans_remote == before:
        assert time.monotonic() < deadline_s, planner.stats
        while not planner.connected and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert engine.has_work
        steps(engine, 1, 0.005)
