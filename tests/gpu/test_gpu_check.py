"""The checks of `parlay gpu-check` on CUDA: right outputs, graphs, gaps, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from parlay.engine.gpu_check.attention_check import check_attention
from parlay.engine.gpu_check.budget import Budget
from parlay.engine.gpu_check.floor import measure_rates
from parlay.engine.gpu_check.main import run_check
from parlay.engine.gpu_check.passes import Cell, Passes, capture_for
from parlay.engine.gpu_check.replay import compare
from parlay.engine.gpu_check.shape_check import TINY, ShapeCheck
from parlay.engine.gpu_check.shapes import SHAPES, parameters, random_llama
from parlay.engine.gpu_check.token_check import check_tokens
from parlay.sim.costs import load_costs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
GPU = torch.device("cuda")


def test_attention_is_right_over_random_shapes() -> None:
    found = check_attention(GPU, Budget.of(60.0), 100)
    assert found["passed"], found["rows"]
    assert "TritonAttention" in {row["backend"] for row in found["rows"]}


def test_whole_models_say_what_they_say_on_a_cpu() -> None:
    found = check_tokens(GPU, Budget.of(120.0))
    assert found["left_out"] == []
    assert all(row["passed"] for row in found["float32"]), found["float32"]
    assert found["bfloat16"]["identical"], found["bfloat16"]


def test_random_weights_take_no_more_than_the_model_and_a_layer() -> None:
    config = SHAPES["1b"].target
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_llama(config, torch.bfloat16, GPU)
    size = 2 * parameters(config)
    assert torch.cuda.memory_allocated() - before < 1.1 * size
    # Rotary tables, and what a layer's linears are joined from.
    assert torch.cuda.max_memory_allocated() - before < 1.25 * size
    assert model.embedding.device.type == "cuda"


def test_graphs_agree_with_their_kernels() -> None:
    passes = Passes(random_llama(SHAPES["tiny"].target, torch.float32, GPU), 64, capture_for(GPU))
    assert passes.graphs is not None
    rows = compare(passes, 64, 0.05)
    assert len(rows) == 4
    assert all(row["logit_error"] < 1e-4 for row in rows), rows
    assert passes.time_ms(Cell(8, 8, 32), 0.01) > 0.0


def test_gaps_are_seen_by_the_profiler() -> None:
    dtype = torch.bfloat16
    one = ShapeCheck(SHAPES["tiny"], TINY, dtype, GPU, measure_rates(GPU, dtype))
    one.load()
    for gap in one.graphs(Budget.of(5.0))["gaps"]:
        assert gap["how"].startswith("profiler")
        assert 0.0 <= gap["gap_us"] <= gap["idle_us"]


def test_the_whole_check_ends_in_time_and_is_a_cost_profile(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    document = run_check(["tiny"], GPU, 1.0, path, Console())
    assert document["passed"], document["verdict"]
    costs = load_costs(str(path))
    assert costs.bucket_edges
    seconds = sum(section["seconds"] for section in document["sections"].values())
    assert seconds < 90.0
