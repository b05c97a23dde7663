"""`parlay bench rpc` on a real sidecar: the figures it must give, and many engines at once."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from parlay.engine import bench_fleet
from parlay.engine.bench_cpu import CpuUse
from parlay.engine.bench_rpc import bench_rpc
from parlay.protos import codec

app = typer.Typer()
app.command()(bench_rpc)
KEYS = {"p50_us", "p99_us", "engine_thread_p50_us", "engine_thread_p99_us", "fresh_share"}


@pytest.mark.slow
def test_the_command_writes_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "rpc.json"
    options = ("--requests", "16", "--steps", "30", "--engines", "2", "--seconds", "2")
    done = CliRunner().invoke(app, [*options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert set(found) > KEYS
    assert found["policy"] == "pilot"
    assert 0.0 < found["p50_us"] <= found["p99_us"]
    assert 0.0 < found["engine_thread_p50_us"] < found["paced_p50_us"]
    assert 0.5 < found["fresh_share"] <= 1.0
    assert found["engines_lost"] == 0
    assert found["engines_steps"] == pytest.approx(400, rel=0.1)
    assert found["engines_p50_us"] <= found["engines_p99_us"]
    assert found["engines_memory_end_mb"] > 10.0
    assert len(found["engines_p99_tenths_us"]) == 10
    assert found["engines_sidecar_cores"] > 0.0
    assert "engines_lost" in done.output


def test_a_sidecar_that_is_not_there_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_fleet, "_PATIENCE_S", 0.2)
    with pytest.raises(OSError, match=r"^the sidecar does not answer: "):
        bench_fleet.measure_fleet("unix:/nowhere/s.sock", 1, 1, 1.0)


def test_what_is_played_again_is_of_other_requests_and_later_steps() -> None:
    engine = bench_fleet.Engine(0, bench_fleet._recorded(0))
    seen: set[int] = set()
    for step in (1, 2, bench_fleet._RECORDED + 1):
        report = bench_fleet._replayed(engine, step)
        assert report.outcome is not None
        assert report.view is not None
        assert (report.outcome.step_id, report.view.step_id) == (step - 1, step)
        assert codec.decode_request(codec.encode_request(report))
        if step != 2:
            assert not seen & set(report.view.request_id.tolist())
        seen |= set(report.view.request_id.tolist())


def test_figures_are_of_every_engine() -> None:
    engines = [
        bench_fleet.Engine(0, [], 100, 0, [1000.0] * 99 + [9000.0]),
        bench_fleet.Engine(1, [], 100, 6, [2000.0] * 100),
    ]
    memory_mb = [50.0, 51.0, 70.0, 60.0, 55.0, 55.0, 54.0]
    found: Any = bench_fleet._figures(engines, memory_mb, CpuUse(1))
    assert (found["engines_steps"], found["engines_lost"]) == (200, 6)
    assert found["engines_p99_us"] == pytest.approx(2000.0, rel=0.05)
    assert (found["engines_memory_start_mb"], found["engines_memory_end_mb"]) == (50.0, 54.0)
    assert found["engines_p99_tenths_us"][:9] == [2000.0] * 9
    assert found["engines_p99_tenths_us"][9] > 7000.0
    unknown: Any = bench_fleet._figures(engines, [], CpuUse(1))
    assert math.isnan(unknown["engines_memory_end_mb"])
    assert math.isnan(unknown["engines_sidecar_cores"])


def test_a_process_that_works_keeps_a_core_busy() -> None:
    use = CpuUse(os.getpid())
    use.note()
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    use.note()
    use.notes[-1] = (use.notes[0][0] + 0.4, *use.notes[-1][1:])
    assert use.cores == pytest.approx(0.5, abs=0.2)
    assert 0.0 <= use.stolen_share <= 1.0


def test_time_that_the_host_gave_to_others_is_a_share_of_all() -> None:
    use = CpuUse(1, [(0.0, 1.0, 2.0, 100.0), (10.0, 6.0, 4.0, 120.0)])
    assert (use.cores, use.stolen_share) == (0.5, 0.1)
