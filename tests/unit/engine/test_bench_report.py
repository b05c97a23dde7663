"""What `parlay bench engine` says of its rows; and one run of it all, small, without vLLM."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parlay.engine import bench, bench_lane, bench_main
from parlay.engine.bench_main import Size
from parlay.engine.bench_report import against_best, findings, print_report, ratio_to_hf


def row(engine: str, mode: str, concurrency: int, *by_round: float) -> dict[str, Any]:
    return {
        "engine": engine, "mode": mode, "concurrency": concurrency, "setting": "",
        "tokens_per_s": sum(by_round) / len(by_round), "tokens_per_s_by_round": list(by_round),
        "ttft_ms": 12.0, "tpot_ms": None, "peak_memory_mb": None,
    }  # fmt: skip


ROWS = [
    row("parlay", "none", 1, 20, 20),
    row("parlay", "gate", 1, 44, 40),
    row("parlay", "adaptive", 1, 40, 42),
    row("hf", "none", 1, 10, 10),
    row("hf_assisted", "heuristic", 1, 20, 14),
    row("parlay", "adaptive", 4, 50, 50),
    row("vllm", "none", 4, 100, 100),
]


def report() -> dict[str, Any]:
    return {
        "rows": ROWS, "rounds": 2, "output_tokens": 40, "ratio_to_hf": ratio_to_hf(ROWS),
        "adaptive_to_best_peer": against_best(ROWS, peers_only=True),
        "adaptive_to_best": against_best(ROWS, peers_only=False),
        "overhead_ms": {"none": {b: {"engine": 0.5, "policy": 0.25} for b in ("4", "32")}},
        "floor": {"weight_bytes": 2e8, "read_bytes_per_s": 4e10, "step_ms": 5.0, "how": "sum"},
        "verify_width": {"1": {"ms": 6.0, "ratio": 1.0}},
    }  # fmt: skip


def test_ours_is_held_against_the_best_in_the_same_round() -> None:
    peers, everybody = against_best(ROWS, peers_only=True), against_best(ROWS, peers_only=False)
    assert peers["1"]["engine"] == "hf_assisted"
    assert peers["1"]["ratio_by_round"] == pytest.approx([2, 3])
    assert peers["1"]["ratio"] == pytest.approx(2.5)
    assert (everybody["1"]["engine"], everybody["1"]["mode"]) == ("parlay", "gate")
    assert everybody["4"]["ratio"] == pytest.approx(0.5)
    assert against_best(ROWS[:3], peers_only=True) == {}


def test_the_ratio_to_hugging_face_is_that_of_one_at_a_time() -> None:
    assert ratio_to_hf(ROWS) == {
        "none": 2,
        "gate": pytest.approx(4.2),
        "adaptive": pytest.approx(4.1),
    }
    assert ratio_to_hf(ROWS[:3]) == {}


def test_the_table_lines_up_and_every_figure_is_said() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    print_report(report(), console)
    text = console.export_text()
    table = [line.rstrip() for line in text.splitlines() if line[:1] in "┏┡│├└┃"]
    assert len({len(line) for line in table}) == 1
    assert len([line for line in table if line.startswith("│")]) == len(ROWS)
    for said in (
        "adaptive at 1 at once: 2.50x the best peer, hf_assisted heuristic",
        "adaptive at 4 at once: 0.50x the best of all others, vllm none",
        "plain decoding is 2.00x Hugging Face's generate",
        "none: 0.50 ms and 0.25 ms of deciding at 4 at once, 0.50 ms and 0.25 ms of deciding at 32",
        "the floor of a step",
        "1 tokens 6.0 ms (1.00x)",
    ):
        assert said in " ".join(findings(report()))


@pytest.mark.slow
def test_a_small_run_of_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {mode: tried[:1] for mode, tried in bench_lane.CANDIDATES.items()}
    monkeypatch.setattr(bench_main, "CANDIDATES", few)
    monkeypatch.setattr(bench, "BUFFER_BYTES", 1 << 24)
    size = Size(4, {1: 1, 4: 4, 16: 4}, 1, 2, 1, 600.0)
    file = tmp_path / "bench.json"
    bench_main.bench_main(size, ["vllm"], Path("nowhere"), file, Console(quiet=True))
    found = json.loads(file.read_text("utf-8"))
    rows = {(r["engine"], r["mode"], r["concurrency"]) for r in found["rows"]}
    ours = {
        ("parlay", m, c) for m in ("none", "best_static", "gate", "adaptive") for c in (1, 4, 16)
    }
    hf = {("hf", "none", c) for c in (1, 4, 16)}
    alone = {("hf_assisted", m, 1) for m in ("confidence", "heuristic")}
    assert rows == ours | hf | alone | {("hf_prompt_lookup", "ngram", 1)}
    for r in found["rows"]:
        assert r["tokens_per_s"] > 0
        assert r["ttft_ms"] > 0
        assert r["tpot_ms"] > 0
        assert r["peak_memory_mb"] > 100
    assert found["floor"]["step_ms"] > 0
    assert set(found["verify_width"]) == {"1", "2", "4", "8"}
    assert set(found["overhead_ms"]) == {"none", "adaptive"}
    assert set(found["ratio_to_hf"]) == {"none", "best_static", "gate", "adaptive"}
