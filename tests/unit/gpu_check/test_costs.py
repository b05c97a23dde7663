"""What `parlay gpu-check` measured as a cost model: monotone curves, odd files refused."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.engine.gpu_check.drafters import RowsCost
from parlay.engine.gpu_check.passes import Cell
from parlay.engine.gpu_check.profile import draft_pass_ms, overhead_ms, profile_of
from parlay.engine.gpu_check.sweep import FINE, Axes, Grid
from parlay.sim.costs import TableCosts, Work, load_costs
from parlay.sim.keyed import fits
from parlay.sim.measured import KIND, profile_in, rising
from parlay.sim.scenario import named_scenarios

AXES = Axes((1, 4, 16), (1, 2, 4), (16, 128, 1024))


def measured(axes: Axes, without: tuple[Cell, ...] = ()) -> Grid:
    """Return what an H200 would be measured as, by the published tables."""
    costs = load_costs("h200_8b")
    ms = {
        c: costs.time(Work(c.batch * c.width, c.batch, c.batch * c.context)).verify_ms
        for c in axes.cells()
        if c not in without
    }
    return Grid(axes, ms, len(without))


def document(target: Grid, edges: tuple[int, ...] = ()) -> dict[str, Any]:
    rows = RowsCost(0.3, 0.01)
    profile = profile_of("a test", target, measured(AXES), rows, RowsCost(0.1, 0.0), [], edges)
    return {"kind": KIND, "profiles": {"8b": profile}}


def written(tmp_path: Path, value: object) -> str:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def test_a_measured_grid_is_met_where_it_was_measured_and_between(tmp_path: Path) -> None:
    costs, truth = load_costs(written(tmp_path, document(measured(FINE)))), load_costs("h200_8b")
    between = [Cell(3, 2, 500), Cell(24, 4, 2000), Cell(100, 1, 700), Cell(200, 7, 1024)]
    errors = []
    for cell in [*FINE.cells(), *between]:
        work = Work(cell.batch * cell.width, cell.batch, cell.batch * cell.context)
        errors.append(costs.time(work).verify_ms / truth.time(work).verify_ms - 1.0)
    assert np.abs(errors).max() < 0.12, "one curve of tokens, however many requests they are of"
    assert np.abs(errors).mean() < 0.02


def test_a_measured_profile_serves_every_loop_of_the_simulator(tmp_path: Path) -> None:
    path = written(tmp_path, document(measured(FINE), (8, 64)))
    costs = load_costs(path)
    assert isinstance(costs, TableCosts)
    assert costs.bucket_edges == (8, 64)
    assert costs.time(Work(3, 3, 300)).padded_tokens == 8
    (scenario,) = named_scenarios("chat_high")
    assert fits(dataclasses.replace(scenario, costs=path))


@given(
    ms=st.lists(st.one_of(st.none(), st.floats(0.1, 100.0)), min_size=27, max_size=27),
    data=st.data(),
)
def test_times_rise_with_tokens_requests_and_context(
    ms: list[float | None], data: st.DataObject
) -> None:
    for corner in (0, 2, 18):
        ms[corner] = ms[corner] or 1.0
    ms[-1] = max(value or 0.0 for value in ms)
    grid = np.array(ms, dtype=object).reshape(3, 3, 3).tolist()
    given_grid = {"batch": [1, 4, 16], "width": [1, 2, 4], "context_tokens": [16, 128, 1024]}
    holder = {"target": {"grid": given_grid | {"ms": grid}}}
    found = profile_in("x.json", holder, "")
    assert isinstance(found, dict)
    target = found["target"]
    assert all(b >= a for a, b in pairwise(target["ms"]))
    table = np.array(target["attention"]["ms"])
    assert np.isfinite(table).all()
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()
    assert target["row_context_ms"] >= 0.0


@given(values=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=12))
def test_pooled_times_rise_and_keep_their_sum(values: list[float]) -> None:
    pooled = rising(np.array(values), np.ones(len(values)))
    assert all(b >= a for a, b in pairwise(pooled))
    assert pooled.sum() == pytest.approx(sum(values))
    assert rising(np.sort(values), np.ones(len(values))) == pytest.approx(np.sort(values))


def test_what_was_left_out_goes_on_at_the_dearest_rate_beside_it(tmp_path: Path) -> None:
    without = (Cell(16, 1, 1024), Cell(16, 2, 1024), Cell(16, 4, 1024))
    whole, part = (
        load_costs(written(tmp_path, document(measured(AXES, w)))).time(Work(16, 16, 16 * 1024))
        for w in ((), without)
    )
    plain = load_costs(written(tmp_path, document(measured(AXES)))).time(Work(16, 16, 16 * 128))
    assert part.verify_ms > plain.verify_ms
    assert part.verify_ms == pytest.approx(whole.verify_ms, rel=0.25)


def test_arithmetic_of_attention_is_charged_where_it_bounds(tmp_path: Path) -> None:
    def ms(cell: Cell) -> float:
        read, rows = 1e-5 * cell.batch * cell.context, 4e-6 * cell.batch * cell.width * cell.context
        return 1.0 + 0.01 * cell.batch * cell.width + max(read, rows)

    axes = Axes((1, 4, 16), (1, 2, 16), (16, 128, 1024))
    grid = Grid(axes, {cell: ms(cell) for cell in axes.cells()}, 0)
    costs = load_costs(written(tmp_path, document(grid)))
    for cell in (Cell(16, 1, 1024), Cell(16, 16, 1024)):
        work = Work(cell.batch * cell.width, cell.batch, cell.batch * cell.context)
        assert costs.time(work).verify_ms == pytest.approx(ms(cell), rel=0.03)


def broken(**changes: Any) -> dict[str, Any]:
    made = document(measured(AXES))
    made["profiles"]["8b"]["target"]["grid"] |= changes
    return made


TABLE = measured(AXES).table()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": [1, 16, 4]}, "batch must ascend"),
        ({"batch": [0, 4, 16]}, "batch must hold whole numbers from 1"),
        ({"width": [1, 2, 10**6]}, "width must hold whole numbers from 1 to 1024"),
        ({"context_tokens": [16, 128.5, 1024]}, "context_tokens must hold whole numbers"),
        ({"context_tokens": None}, "needs 'context_tokens'"),
        ({"ms": TABLE[:2]}, "as long as the axes"),
        ({"ms": [[[0.0] * 3] * 3] * 3}, "ms above 0"),
        ({"ms": [[[math.inf] * 3] * 3] * 3}, "ms above 0"),
        ({"ms": [[[1e6] * 3] * 3] * 3}, "at most 60000"),
        ({"ms": [[["1"] * 3] * 3] * 3}, "ms above 0"),
        ({"ms": [[[None] * 3] * 3] * 3}, "lacks batch 1"),
        ({"ms": [[[9.0] * 3] * 3, TABLE[1], [[1.0] * 3] * 3]}, "measure again"),
        ({"batch": [1], "ms": TABLE[:1]}, "at least two batches"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as error:
        load_costs(written(tmp_path, broken(**changes)))
    assert "\n" not in str(error.value)
    assert "target.grid" in str(error.value)


def test_a_document_names_its_shapes(tmp_path: Path) -> None:
    two = document(measured(AXES))
    slow = json.loads(json.dumps(two["profiles"]["8b"]))
    slow["overhead_ms"] = 7.0
    two["profiles"] = {"1b": two["profiles"]["8b"], "8b": slow}
    path = written(tmp_path, two)
    assert load_costs(path).time(Work(1, 1, 1)).overhead_ms == 7.0
    assert load_costs(f"{path}#1b").time(Work(1, 1, 1)).overhead_ms == 0.0
    with pytest.raises(ValueError, match="has no shape '70b'; it has 1b, 8b"):
        load_costs(f"{path}#70b")
    with pytest.raises(ValueError, match="no whole profile"):
        load_costs(written(tmp_path, {"kind": KIND, "profiles": {}}))
    with pytest.raises(ValueError, match="leave '#1b' out"):
        load_costs(written(tmp_path, two["profiles"]["1b"]) + "#1b")
    with pytest.raises(ValueError, match="must be a JSON object"):
        load_costs(written(tmp_path, [1]))


def test_the_hosts_times_are_those_of_small_batches() -> None:
    runs = [
        {"mode": "none", "batch": 1, "context_tokens": 16, "host_ms": 0.4, "draft_ms": 0.0},
        {"mode": "none", "batch": 8, "context_tokens": 16, "host_ms": 0.6, "draft_ms": 0.0},
        {"mode": "none", "batch": 128, "context_tokens": 16, "host_ms": 9.0, "draft_ms": 0.0},
        {"mode": "draft-3", "batch": 4, "context_tokens": 100, "host_ms": 1.0, "draft_ms": 6.0},
        {"mode": "draft-1", "batch": 4, "context_tokens": 100, "host_ms": 1.0, "draft_ms": 2.5},
        {"mode": "draft-7", "batch": 4, "context_tokens": 100, "host_ms": 1, "draft_ms": math.nan},
    ]
    grid = Grid(Axes((1, 4), (1,), (16, 128)), {Cell(4, 1, 16): 0.1, Cell(4, 1, 128): 1.5}, 0)
    assert overhead_ms(runs) == pytest.approx(0.5)
    assert draft_pass_ms(runs, grid) == pytest.approx((0.5 + 1.0) / 2)
    assert overhead_ms([]) == draft_pass_ms([], grid) == 0.0
