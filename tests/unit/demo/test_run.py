"""The whole demo on the virtual backend: what is run, what is reported."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from parlay.engine import virtual
from parlay.engine.demo.budget import FULL, QUICK, Costs, Plan, choose_shape
from parlay.engine.demo.modes import Lane, demo_modes, open_lanes
from parlay.engine.demo.plot import plot
from parlay.engine.demo.prompts import TASKS, demo_prompts
from parlay.engine.demo.report import findings, print_report, report_of
from parlay.engine.demo.run import DemoRun, TooSlow, run_demo
from parlay.engine.demo.soundness import compare, judge
from parlay.engine.demo.workload import Cell, CellRun, cells_of, output_lengths, run_cell
from parlay.engine.request import Request
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.policies.types import Array, Proposer

TOKENS = 10
PLAN = replace(QUICK, wishes=((2, TOKENS),), rounds_s=1e9, check_s=100.0, deadline_s=300.0)
PROMPTS = demo_prompts()
IDS = [[index + 1] * 20 for index in range(len(PROMPTS))]
# Copying tasks love the n-gram, the others have no match and an expensive draft.
COPY = virtual.Task({Proposer.NGRAM: (0.9,), Proposer.DRAFT_MODEL: (0.2,)})
WRITE = virtual.Task({Proposer.NGRAM: (0.1,), Proposer.DRAFT_MODEL: (0.5,)}, match_rate=0.1)
HAZARDS = virtual.Hazards({t: WRITE if t in ("chat", "code") else COPY for t in TASKS})


def text_by_prompt(request: Request, count: int) -> Array:
    """Return a text that depends on the prompt alone, as a greedy model's does."""
    start = len(request.tokens)
    return (request.tokens[0] * 1000 + np.arange(start, start + count)).astype(np.int64)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Sequence[Lane]:
    monkeypatch.setattr(virtual, "_text", text_by_prompt)
    monkeypatch.setattr(virtual, "VOCAB", 10**9)
    modes = tuple(replace(mode, sidecar=False) for mode in demo_modes("goodput"))
    backend = virtual.VirtualBackend(HAZARDS, virtual.StepCost(10.0, 0.2))
    with ExitStack() as stack:
        return open_lanes(stack, modes, backend, EngineConfig(), ())


def decode(lanes: Sequence[Lane], plan: Plan = PLAN, started_s: float | None = None) -> DemoRun:
    console = Console(file=io.StringIO())
    start = time.monotonic() if started_s is None else started_s
    return run_demo(lanes, PROMPTS, IDS, plan, console, start)


class NobodyDiverged:
    """An oracle that must not be needed."""

    def behind(
        self, prompt: int, output: Sequence[int], tokens: Sequence[tuple[int, int]]
    ) -> Array:
        raise AssertionError

    def noise(self, outputs: object, quantile: float) -> float:
        raise AssertionError


def test_every_mode_decodes_the_same_and_the_report_adds_up(
    lanes: Sequence[Lane], tmp_path: Path
) -> None:
    done = decode(lanes)
    assert len(done.rounds) == 2
    lengths = output_lengths(PROMPTS, TOKENS)
    assert len(set(lengths[:4])) == 4, "requests end one by one"
    for by_mode in done.rounds:
        for runs in by_mode.values():
            for cell, cell_run in zip(done.cells, runs, strict=True):
                assert cell_run.tokens == sum(lengths[i] for i in cell.prompts)
                assert [p for p, _ in cell_run.outputs] == list(cell.prompts)
    report = report_of(done, "goodput", judge(compare(done), NobodyDiverged()))
    modes = report["modes"]
    assert list(modes) == ["none", "ngram-3", "ngram-7", "draft-1", "draft-3", "gate", "adaptive"]
    assert (modes["none"]["ratio_to_none"], modes["none"]["mean_acceptance_length"]) == (1.0, 1.0)
    assert modes["none"]["share_by_proposer"] == {"none": 1.0}
    assert set(modes["draft-3"]["share_by_proposer"]) <= {"none", "draft_model"}
    assert modes["ngram-7"]["per_cell"]["edit@1"]["ratio_to_none"] > 2
    assert modes["ngram-7"]["mean_k_by_task"]["edit"] > modes["ngram-7"]["mean_k_by_task"]["chat"]
    assert modes["adaptive"]["ratio_to_none"] > 1
    assert report["adaptive"] == "adaptive"
    assert report["best_static"] in modes
    assert report["per_cell_best"]["picks"]["edit@1"] in ("ngram-7", "gate")
    assert 0 < report["min_cell_ratio"] <= modes["adaptive"]["ratio_to_none"]
    assert (report["identical"], report["sound_divergences"]) == (True, 0)
    assert report["outputs_compared"] == 2 * 6 * sum(len(c.prompts) for c in done.cells)

    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    assert "token for token" in out.getvalue()
    assert "\u2026" not in out.getvalue(), "a table was cut"
    assert max(len(line) for line in out.getvalue().splitlines()) <= 80
    picture = tmp_path / "k.png"
    plot(done, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="cannot write the plot"):
        plot(done, tmp_path / "nowhere" / "k.png")


def test_each_mode_goes_first_as_often_as_the_others(
    lanes: Sequence[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, str]] = []
    names = {id(lane.engine): lane.mode.name for lane in lanes}

    def spy(engine: Engine, cell: Cell, *rest: Any) -> CellRun:
        order.append((names[id(engine)], cell.label))
        return run_cell(engine, cell, *rest)

    monkeypatch.setattr("parlay.engine.demo.run.run_cell", spy)
    decode(lanes)
    first = [mode for mode, _ in order[:: len(lanes)]]
    assert len(first) == 2 * 21
    assert {first.count(name) for name in names.values()} == {6}
    assert all(len({cell for _, cell in order[i : i + 7]}) == 1 for i in range(0, len(order), 7))


def test_out_of_time_keeps_whole_rounds_only(
    lanes: Sequence[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("parlay.engine.demo.run.time.monotonic", lambda: float(next(ticks)))
    # 147 cells and modes a round of some two ticks each, and time for 450 of them.
    done = decode(lanes, replace(PLAN, deadline_s=550.0), started_s=0.0)
    assert (len(done.rounds), done.stopped_early) == (1, True)
    report = report_of(done, "goodput", judge(compare(done), NobodyDiverged()))
    assert "only one round" in findings(report)[-1]
    assert not any("other" in line for line in findings(report)[:2]), "there is no other half"


def test_without_a_terminal_lines_say_where_it_is(
    lanes: Sequence[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("parlay.engine.demo.run.time.monotonic", lambda: float(next(ticks)))
    out = io.StringIO()
    console = Console(file=out, width=100)
    plan = replace(PLAN, deadline_s=1200.0)
    done = run_demo(lanes, PROMPTS, IDS, plan, console, 0.0)
    said = [line for line in out.getvalue().splitlines() if line.startswith("round ")]
    assert len(said) > 5
    assert said[-1].startswith("round 2/2")
    assert not done.stopped_early


def test_too_slow_for_one_round(lanes: Sequence[Lane]) -> None:
    with pytest.raises(TooSlow, match="too slow"):
        decode(lanes, started_s=time.monotonic() - 250.0)


@pytest.mark.parametrize("plan", [QUICK, FULL])
@pytest.mark.parametrize("slower", [0.3, 1.0, 1.3])
def test_the_shape_fits_the_time(plan: Plan, slower: float) -> None:
    step_ms = {1: 15 * slower, 4: 20 * slower, 16: 50 * slower}
    costs, ids = Costs(step_ms, 0.6 * slower), [[1] * 170] * len(PROMPTS)
    shape = choose_shape(plan, costs, PROMPTS, ids, 7)
    cells = cells_of(PROMPTS, shape)
    tokens = [len(i) for i in ids]
    lengths = output_lengths(PROMPTS, shape.output_tokens)
    a_pass_s = sum(costs.seconds(c, tokens, lengths) for c in cells)
    assert 7 * shape.rounds * a_pass_s <= plan.rounds_s
    assert shape.rounds >= 2
    assert plan.rounds_s + plan.check_s < plan.deadline_s


def test_a_hopeless_machine_gets_the_smallest_shape() -> None:
    costs = Costs({1: 1e4, 4: 1e4, 16: 1e4}, 100.0)
    shape = choose_shape(QUICK, costs, PROMPTS, IDS, 7)
    assert (shape.rounds, shape.output_tokens) == QUICK.wishes[-1]
