"""Graphs against one kernel after another, in Triton's interpreter: agreement, and times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import triton_cases  # before triton is imported

from parlay.engine.attention.choice import VARIABLE
from parlay.engine.gpu_check import passes as module
from parlay.engine.gpu_check import replay
from parlay.engine.gpu_check.passes import Cell, Passes
from parlay.engine.gpu_check.report import verdict
from parlay.engine.gpu_check.shapes import SHAPES, random_llama
from parlay.engine.graph_capture import EagerCapture, Recording, Work

pytestmark = pytest.mark.skipif(not triton_cases.INTERPRETED, reason="tests/gpu has a GPU's")
CPU = torch.device("cpu")


class Stuck(EagerCapture):
    """Replays what was recorded over an empty pass."""

    def record(self, work: Work) -> Recording:
        return Recording(super().record(work).results, lambda: None)


def passes_by(capture: EagerCapture, monkeypatch: pytest.MonkeyPatch) -> Passes:
    monkeypatch.setenv(VARIABLE, "triton")
    return Passes(random_llama(SHAPES["tiny"].target, torch.float32, CPU), 12, capture)


def test_a_graph_says_what_its_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, cell = passes_by(EagerCapture(), monkeypatch), Cell(2, 3, 20)
    assert passes.graphs is not None
    assert replay.logit_error(passes, cell) < 1e-5
    assert passes.graphs.stats.replayed == 1, "the eager way takes none"
    assert torch.equal(passes.choose(cell), passes.choose(cell, eager=True))
    assert passes.choose(cell).shape == (6,), "padding is cut off"
    assert passes.graphs.stats.replayed == 3


def test_a_graph_that_reads_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = passes_by(Stuck(), monkeypatch)
    apart = replay.logit_error(passes, Cell(2, 3, 20))
    assert not apart <= replay.MOST_ERROR
    row = {"batch": 2, "width": 3, "logit_error": apart, "agrees": False}
    right = {"passed": True}
    sections: dict[str, dict[str, Any]]
    sections = {"attention": right, "tokens": right, "1b graphs": {"rows": [row]}}
    passed, lines = verdict(sections)
    assert not passed
    assert "batch 2, width 3" in lines[0]
    row["agrees"] = True
    assert verdict(sections) == (True, [])


@pytest.mark.slow
def test_both_ways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_ROUNDS", 1)
    monkeypatch.setattr(module, "_LEAST_REPEATS", 1)
    rows = replay.compare(passes_by(EagerCapture(), monkeypatch), 8, 0.0)
    assert [(r["batch"], r["width"]) for r in rows] == [(1, 1), (1, 4), (1, 8), (8, 4)]
    for row in rows:
        assert row["agrees"]
        assert row["speedup"] == pytest.approx(row["eager_ms"] / row["graph_ms"])
    assert replay.bar_of(rows)["speedup"] == rows[0]["speedup"]
