from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parlay.engine.plugins import sglang

GRAPHS = [1, 2, 4, 8, 16, 32, 64]
Make = Callable[..., Any]


class Worker:
    """Swaps its states as SGLang's worker does, and keeps what it ran with."""

    def __init__(self) -> None:
        self.speculative_num_steps = 3
        self.built: dict[int, list[int] | None] = {}

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> Any:
        assert speculative_num_draft_tokens == speculative_num_steps + 1
        self.built[speculative_num_steps] = cuda_graph_bs
        return SimpleNamespace(speculative_num_steps=speculative_num_steps)

    def apply_runtime_state(self, state: Any) -> None:
        self.speculative_num_steps = state.speculative_num_steps


def started(make: Make, config: str | None = None, graphs: list[int] | None = None) -> Any:
    controller = make(Worker(), config)
    controller.init_states(graphs)
    return controller


def run(controller: Any, right: float, batches: list[int], seed: int = 0) -> list[int]:
    """Decode as SGLang's overlapping scheduler does: a step starts before the last one is told."""
    rng, ran, under_way = np.random.default_rng(seed), [], []
    for rows in batches:
        controller.activate_step_by_batch(rows)
        steps = controller.worker.speculative_num_steps
        held = (rng.random((rows, steps)) < right).cumprod(axis=1).sum(axis=1).tolist()
        ran.append(steps)
        under_way.append((held, rows))
        if len(under_way) == 2:
            controller.on_verify_complete(*under_way.pop(0))
    assert controller.params.parlay is not None, "it stopped steering"
    return ran


@pytest.fixture
def several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "ranks", lambda: 2)


@pytest.fixture
def free(tmp_path: Path) -> str:
    """A configuration that leaves all steps to every batch."""
    (tmp_path / "steps.json").write_text(json.dumps({"1": {"candidate_steps": [0, 1, 3, 5, 7]}}))
    return str(tmp_path / "steps.json")


def test_sglangs_plugins_put_our_policy_in_its_place(controller: Make) -> None:
    made = started(controller)
    assert type(made.params).__name__ == "ParlayAdaptiveSpeculativeParams"
    assert made.params.parlay.clock is not None  # one process
    assert made.worker.built.keys() == {0, 1, 3, 5, 7}


@pytest.mark.usefixtures("several_ranks")
def test_drafts_as_deep_as_drafts_hold(controller: Make, free: str) -> None:
    deep = run(started(controller, free), 0.95, [4] * 150)
    flat = run(started(controller, free), 0.02, [4] * 150)
    assert np.mean(deep[-60:]) > 4
    assert np.mean(flat[-60:]) < 1


@pytest.mark.usefixtures("several_ranks")
def test_every_rank_runs_the_same_steps(controller: Make, free: str) -> None:
    batches = [1 + i // 7 % 12 for i in range(200)]
    one, other = (run(started(controller, free), 0.7, batches) for _ in range(2))
    assert one == other
    assert len(set(one)) > 2


@pytest.mark.usefixtures("several_ranks")
def test_only_steps_that_have_a_graph_for_the_batch_run(controller: Make) -> None:
    made = started(controller, None, GRAPHS)
    batches = [1 + i % 64 for i in range(200)]
    ran = run(made, 0.9, batches)
    for rows, steps in zip(batches, ran, strict=True):
        size = next(g for g in GRAPHS if g >= rows)
        captured = made.worker.built[steps]
        assert captured is None or size in captured
    assert {s for r, s in zip(batches, ran, strict=True) if r > 32} == {0}
    assert max(ran) > 1


def test_what_fails_leaves_it_to_sglangs_own_rule(controller: Make, free: str) -> None:
    made = started(controller, free)
    made.params.parlay.steps = None
    for _ in range(30):
        made.activate_step_by_batch(2)
        made.on_verify_complete([made.worker.speculative_num_steps] * 2, 2)
    assert made.params.parlay is None
    assert made.worker.speculative_num_steps == 7
