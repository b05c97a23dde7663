"""The plugin that the README shows, on the virtual backend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from parlay.engine.plugins.settings import read_settings
from parlay.engine.request import Request, SpeculationParams
from parlay.engine.virtual import Hazards, StepCost, Task, VirtualBackend
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Proposer

README = Path(__file__).parents[3] / "engine/plugins/README.md"
TASKS = {
    "copy": Task({Proposer.NGRAM: (0.95,), Proposer.DRAFT_MODEL: (0.6, 0.5)}),
    "chat": Task({Proposer.NGRAM: (0.05,), Proposer.DRAFT_MODEL: (0.85,)}, match_rate=0.2),
}


def snippet() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 1
    return str(blocks[0])


def run(policy: str, hints: dict[str, Any] | None = None) -> tuple[Any, list[Request], float]:
    names: dict[str, Any] = {}
    exec(compile(snippet(), str(README), "exec"), names)
    backend = VirtualBackend(Hazards(TASKS), StepCost(), EngineLimits(k_max=8))
    engine = names["SteeredEngine"](backend, read_settings(policy, environ={}))
    requests = [
        engine.add(range(5), SpeculationParams(task=task), hints)
        for task in TASKS
        for _ in range(3)
    ]
    for _ in range(2000):
        if not engine.live:
            break
        engine.step()
    return engine, requests, backend.time_s


def test_it_is_about_sixty_lines() -> None:
    assert len([line for line in snippet().splitlines() if line.strip()]) < 70


def test_it_speculates_and_gains_and_leaves_the_text_alone() -> None:
    plain, expected, plain_s = run("none")
    steered, found, steered_s = run("goodput")
    assert [r.output for r in found] == [r.output for r in expected]
    assert all(r.output_tokens == 128 for r in found)
    assert plain.adapter.counters.drafted.sum() == 0
    assert steered.adapter.counters.errors == 0
    assert steered.adapter.counters.emitted == 6 * 128
    assert plain_s / steered_s > 1.2


@pytest.mark.parametrize("hints", [{"parlay_speculate": "false"}, {"parlay_max_k": 0}])
def test_requests_may_opt_out(hints: dict[str, Any]) -> None:
    engine, _, _ = run("goodput", hints)
    assert engine.adapter.counters.drafted.sum() == 0
