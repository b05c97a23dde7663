"""The grid that is measured, its floors and bars; models of random weights; drafters' costs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from parlay.engine.gpu_check import replay
from parlay.engine.gpu_check.budget import Budget
from parlay.engine.gpu_check.drafters import RandomHeads, RowsCost, ngram_ms, rows_cost
from parlay.engine.gpu_check.floor import Rates, floor_of, measure_rates
from parlay.engine.gpu_check.passes import Cell, Passes
from parlay.engine.gpu_check.shapes import (
    SHAPES,
    RandomWeights,
    kv_numbers,
    parameters,
    random_llama,
    read_parameters,
)
from parlay.engine.gpu_check.sweep import GRIDS, Axes, Grid, bar_of, ordered, rows_of, sweep

CPU = torch.device("cpu")
COARSE = Axes((1, 4), (1, 2), (16, 64))
NORMAL = Axes((1, 2, 4), (1, 2), (16, 64))
TIGHT = (Axes((1, 2, 3, 4), (1, 2), (16, 32, 64)), NORMAL, COARSE)


class Machine:
    """A clock that a measurement moves."""

    def __init__(self, cell_s: float, ms: float = 1.0) -> None:
        self.now_s, self.cell_s, self.ms = 0.0, cell_s, ms
        self.seen: list[Cell] = []

    def measure(self, cell: Cell, seconds: float) -> float:
        del seconds
        self.now_s += self.cell_s
        self.seen.append(cell)
        return self.ms * cell.batch * cell.width

    def budget(self, seconds: float) -> Budget:
        return Budget.of(seconds, lambda: self.now_s)


def everything(_: Cell) -> bool:
    return True


def test_the_finest_grid_that_time_allows_is_measured() -> None:
    for seconds, axes in ((100.0, TIGHT[0]), (1.6, NORMAL), (0.5, COARSE)):
        machine = Machine(0.08)
        found = sweep(TIGHT, everything, machine.measure, machine.budget(seconds))
        assert found.axes == axes
        assert found.left_out == 0
        assert found.ms.keys() == set(axes.cells())
        assert len(machine.seen) == len(set(machine.seen)), "no cell twice"
        assert machine.now_s < seconds + 0.2


def test_a_slow_machine_measures_the_coarse_grid_and_detail_goes_first() -> None:
    machine = Machine(0.06, ms=300.0)
    found = sweep(TIGHT, everything, machine.measure, machine.budget(10.0))
    assert found.axes == COARSE
    late = Machine(0.5)
    cut = sweep(TIGHT, everything, late.measure, late.budget(6.0))
    assert set(COARSE.cells()) <= cut.ms.keys()
    assert cut.left_out == len(cut.axes.cells()) - len(cut.ms)
    assert list(ordered(TIGHT[0], TIGHT))[:8] == sorted(COARSE.cells())


def test_cells_that_do_not_fit_are_null() -> None:
    machine = Machine(0.01)

    def measure(cell: Cell, seconds: float) -> float:
        return math.nan if cell == Cell(2, 1, 16) else machine.measure(cell, seconds)

    found = sweep((NORMAL,), lambda c: c.batch * c.context < 256, measure, machine.budget(9.0))
    assert found.left_out == 3
    table = found.table()
    assert table[1][0][0] is None
    assert table[2][0][1] is None
    assert table[0][1][0] == 2.0
    assert all(c.batch * c.context < 256 for c in machine.seen)


def test_grids_go_from_fine_to_coarse_and_share_their_corners() -> None:
    sizes = [len(grid.cells()) for grid in GRIDS]
    assert sizes == sorted(sizes, reverse=True)
    for finer, coarser in pairwise(GRIDS):
        assert set(coarser.cells()) <= set(finer.cells())
    ends = GRIDS[0].batches[-1], GRIDS[0].widths[0], GRIDS[0].widths[-1]
    assert ends == (256, 1, 16)
    assert set(GRIDS[-1].corners) <= set(GRIDS[-1].cells())


def test_a_floor_is_weights_and_kv_over_the_copy_rate() -> None:
    target = SHAPES["8b"].target
    assert parameters(target) == 8_030_261_248, "Llama-3.1-8B's"
    assert read_parameters(target) == parameters(target) - 128_256 * 4096
    assert kv_numbers(target) == 65_536
    one = SHAPES["1b"].target
    assert parameters(one) == read_parameters(one) == 1_235_814_400, "Llama-3.2-1B's, tied"
    floor = floor_of(target, torch.bfloat16, Rates(4e12, 800e12))
    weights_ms = 1e3 * 2 * read_parameters(target) / 4e12
    assert floor.bytes_ms(1, 1, 0) == pytest.approx(weights_ms, rel=1e-4)
    kv_ms = 1e3 * 32 * 1028 * 131_072 / 4e12
    assert floor.bytes_ms(32, 4, 1024) == pytest.approx(weights_ms + kv_ms, rel=1e-6)
    assert floor.flops_ms(32, 16) == pytest.approx(2e3 * 512 * read_parameters(target) / 800e12)
    assert floor.reads(32, 4, 1024)
    assert not floor.reads(32, 16, 128)


def test_the_bar_is_judged_on_what_reading_bounds() -> None:
    floor = floor_of(SHAPES["8b"].target, torch.bfloat16, Rates(4e12, 800e12))
    cells = [Cell(1, 1, 128), Cell(32, 16, 128), Cell(256, 1, 128)]

    def times(ratio: float) -> Grid:
        ms = {c: floor.bytes_ms(c.batch, c.width, c.context) * ratio for c in cells}
        ms[cells[1]] *= 3.0
        return Grid(Axes((1, 32, 256), (1, 16), (128,)), ms, 3)

    rows = rows_of(times(1.2), floor)
    assert [row["ratio"] for row in rows] == pytest.approx([1.2, 3.6, 1.2])
    good, bad = bar_of(rows), bar_of(rows_of(times(1.4), floor))
    assert good["passed"]
    assert (good["cells"], good["read_bound"], good["within"], good["within_of_all"]) == (
        2,
        1,
        1,
        1,
    )
    assert good["worst"] == pytest.approx(1.2)
    assert not bad["passed"]
    assert not bar_of([])["passed"], "nothing measured is nothing met"


def test_the_bar_of_graphs_is_plain_decoding_alone() -> None:
    rows = [{"batch": 1, "width": 4, "speedup": 9.0}, {"batch": 1, "width": 1, "speedup": 1.4}]
    assert not replay.bar_of(rows)["passed"]
    rows[1]["speedup"] = 1.6
    assert replay.bar_of(rows)["passed"]
    assert not replay.bar_of(rows[:1])["passed"]


def test_random_weights_are_distinct_and_of_the_shapes_of_the_config() -> None:
    config = SHAPES["tiny"].target
    weights = RandomWeights(config, torch.float32, CPU)
    assert {n: tuple(weights[n].shape) for n in weights} == config.tensor_shapes()
    assert len(weights) == len(config.tensor_shapes())
    a, b = (weights[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(a, b)
    assert a.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(weights["model.norm.weight"], torch.ones(config.hidden))
    model = random_llama(config, torch.float32, CPU)
    assert model.config == config


def test_passes_are_timed_at_the_sizes_that_were_asked_for() -> None:
    passes = Passes(random_llama(SHAPES["tiny"].target, torch.float32, CPU), 40)
    assert passes.graphs is None
    assert passes.choose(Cell(3, 4, 100)).shape == (12,)
    assert passes.fits(Cell(8, 8, 64)), "40 blocks"
    assert not passes.fits(Cell(8, 8, 80))
    assert not passes.fits(Cell(1, 1, 8192)), "the model's context"
    assert passes.time_ms(Cell(2, 2, 32), 0.0) > 0.0
    assert (passes.runner.cache.cache.layers[0] != 0).any(), "noise, not zeros"
    rates = measure_rates(CPU, torch.float32)
    assert rates.bytes_per_s > 1e8
    assert rates.flops > 1e8


def test_drafters_cost_a_fixed_part_and_one_a_row() -> None:
    found = rows_cost(lambda n: 0.5 + 0.01 * n, (8, 1, 128))
    assert [found.fixed_ms, found.row_ms] == pytest.approx([0.5, 0.01])
    assert rows_cost(lambda n: 0.5 / n, (1, 4)) == RowsCost(0.5, 0.0)
    assert 0.0 < ngram_ms(2, 64) < 1e3
    heads = RandomHeads(random_llama(SHAPES["tiny"].target, torch.float32, CPU))
    assert heads.time_ms(2) > 0.0
