"""A tiny engine under steady load whose every output is known, to harm its sidecar under."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache

import torch
from tests.metered import Meter, Metered

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
RECOVERED_S = 2.0
"""Steered again so long after a fault's end, at most."""
PACE_S = 0.005
MOST_STEP_S = 0.25
AT_ONCE = 6
KINDS = 12
CONFIG = EngineConfig(max_running=8, token_budget=64, target_blocks=128, draft_blocks=1)
TINY = ModelConfig(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=40, rope_theta=10000.0,
    norm_eps=1e-5, context=256, tied=True, eos_ids=(),
)  # fmt: skip


@cache
def tiny_model() -> Llama:
    source = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=source) * (1.0 if len(shape) == 1 else 0.15)
        for name, shape in TINY.tensor_shapes().items()
    }
    embedding = weights["model.embed_tokens.weight"]
    return Llama(TINY, weights, embedding, torch.float32, torch.device("cpu"))


class Load:
    """An engine that always has some requests: greedy ones, and coupled ones with seeds."""

    def __init__(self, planner: Planner) -> None:
        backend = TorchBackend(tiny_model(), None, CONFIG, k_max=8)
        self.engine = Engine(backend, planner, CONFIG)
        self.requests: list[Request] = []

    def add(self) -> None:
        """Queue the next request; every twelfth is the same."""
        i = len(self.requests) % KINDS
        prompt = [(i + 3 * j) % TINY.vocab for j in range(5 + i)] * 2
        coupled = i % 2 == 1
        sampling = SamplingParams(
            temperature=0.9 if coupled else 0.0, seed=i if coupled else None, max_tokens=60
        )
        self.requests.append(self.engine.add(prompt, sampling))

    def step(self) -> None:
        """Run one step of a batch that is as full as it is to be, at an engine's usual pace."""
        while sum(not r.finished for r in self.requests[-2 * AT_ONCE :]) < AT_ONCE:
            self.add()
        self.engine.step()
        time.sleep(PACE_S)

    def finish(self) -> None:
        """Run what is left to its end."""
        while self.engine.has_work:
            self.engine.step()

    def outputs(self) -> list[list[int]]:
        """Return every request's output."""
        assert all(r.finished for r in self.requests)
        return [list(r.output) for r in self.requests]


@cache
def known_outputs() -> list[list[int]]:
    """Return what each kind of request makes without any speculation."""
    load = Load(LocalPlanner(make_policy("none")))
    for _ in range(KINDS):
        load.add()
    load.finish()
    return load.outputs()


class Steered(Load):
    """A load whose engine asks a sidecar; steps that it did not answer in time are decided here."""

    def __init__(self, target: str) -> None:
        self._known, self.meter = known_outputs(), Meter()
        limits = TorchBackend(tiny_model(), None, CONFIG, k_max=8).limits()
        fallback = Metered(LocalPlanner(make_policy("ngram_gate", None, limits)), self.meter, -1)
        self.planner = RemotePlanner(target, EngineInfo("engine", limits), fallback)
        super().__init__(Metered(self.planner, self.meter))

    def run(self, seconds: float) -> tuple[int, int]:
        """Step for so long; return how many steps the sidecar steered, and how many not."""
        stats, end_s = self.planner.stats, time.monotonic() + seconds
        before = (stats.plans_remote, stats.plans_local)
        while time.monotonic() < end_s:
            self.step()
        return stats.plans_remote - before[0], stats.plans_local - before[1]

    def until(self, holds: Callable[[], bool], limit_s: float = WAIT_S) -> float:
        """Step until it holds; return after how many seconds.

        A step counts for no more than it can take: longer, and the whole machine stood still.
        """
        spent_s = 0.0
        while not holds():
            assert spent_s < limit_s, self._said()
            began_s = time.monotonic()
            self.step()
            spent_s += min(time.monotonic() - began_s, MOST_STEP_S)
        return spent_s

    def _said(self) -> str:
        stats = self.planner.stats
        steps = f"remote={stats.plans_remote} local={stats.plans_local}"
        return f"{steps} {dict(stats.endings)} {stats.last_error}"

    def until_steered(self, limit_s: float = WAIT_S) -> float:
        """Step until a step follows the sidecar; return after how many seconds."""
        before = self.planner.stats.plans_remote
        return self.until(lambda: self.planner.stats.plans_remote > before, limit_s)

    def until_alone(self) -> float:
        """Step until a step follows the fallback; return after how many seconds."""
        before = self.planner.stats.plans_local
        return self.until(lambda: self.planner.stats.plans_local > before)

    def check(self) -> None:
        """Assert that outputs are the known ones, and that no step's planning took too long."""
        self.finish()
        for number, output in enumerate(self.outputs()):
            assert output == self._known[number % KINDS], f"request {number}"
        assert sum(r.accepted for r in self.requests) > 0
        self.meter.check()

    def recovers(self) -> None:
        """Assert that the sidecar steers again soon enough after now."""
        self.until_steered(RECOVERED_S)


@contextmanager
def steered(target: str) -> Iterator[Steered]:
    """Run a load under a sidecar's steering, for the block to harm.

    In the end every request must have the output it has without any speculation, and no step may
    have cost the engine's thread more than it may.
    """
    load = Steered(target)
    with closing(load.planner), load.meter.watching():
        load.until_steered()
        yield load
        load.check()
