"""The whole check on a CPU: sections, what is saved when, what breaks down, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from parlay.engine.gpu_check import cli, main, shape_check
from parlay.engine.gpu_check.floor import Rates
from parlay.engine.gpu_check.main import run_check
from parlay.engine.gpu_check.plot import plot
from parlay.engine.gpu_check.report import verdict
from parlay.engine.gpu_check.shape_check import TINY, Room, ShapeCheck
from parlay.engine.gpu_check.shapes import SHAPES
from parlay.policies.files import write_json
from parlay.sim.costs import Work, load_costs

CPU = torch.device("cpu")
RIGHT: dict[str, Any] = {
    "rows": [], "float32": [], "passed": True,
    "bfloat16": {
        "identical": True, "divergent_outputs": 0, "outputs_compared": 1, "sound_divergences": 0,
    },
}  # fmt: skip


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take correctness as shown: other tests show it."""
    monkeypatch.setattr(main, "check_attention", lambda *_: dict(RIGHT))
    monkeypatch.setattr(main, "check_tokens", lambda *_: dict(RIGHT))
    monkeypatch.setattr(main, "measure_rates", lambda *_: Rates(1e10, 1e11))


def checked(json_file: Path, console: Console | None = None) -> dict[str, Any]:
    return run_check(["tiny"], CPU, 0.05, json_file, console or Console(quiet=True))


@pytest.mark.slow
@pytest.mark.usefixtures("right")
def test_every_section_is_measured_printed_saved_and_drawn(tmp_path: Path) -> None:
    path, console = tmp_path / "gpu.json", Console(record=True, width=120, quiet=False)
    document = checked(path, console)
    assert document["passed"]
    assert document["verdict"] == []
    names = ["attention", "tokens", *(f"tiny {n}" for n in ("load", "verify", "drafting"))]
    assert list(document["sections"]) == [*names, "tiny graphs", "tiny engine"]
    assert not [s for s in document["sections"].values() if "failed" in s]
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["sections"].keys() == document["sections"].keys()
    text = console.export_text()
    for said in (
        "times its byte floor",
        "host gap between steps at most 200 us",
        "draft-7",
        "against the best",
    ):
        assert said in text
    engine = saved["sections"]["tiny engine"]["rows"]
    assert {row["batch"] for row in engine} == set(TINY.batches)
    assert {"none", "draft-1", "draft-3", "draft-5", "draft-7", "goodput", "pilot"} == {
        row["mode"] for row in engine
    }
    assert plot(document, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    costs = load_costs(str(path))
    assert costs.time(Work(8, 2, 64, (2, 2), 64, 1, 1)).step_ms > 0.0
    assert costs.time(Work(64, 8, 8 * 64)).verify_ms >= costs.time(Work(1, 1, 16)).verify_ms


@pytest.mark.usefixtures("right")
def test_a_section_that_breaks_down_is_told_and_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> dict[str, Any]:
        raise RuntimeError("CUDA error:\nan illegal memory access")

    monkeypatch.setattr(ShapeCheck, "verify", breaks)
    monkeypatch.setattr(ShapeCheck, "graphs", lambda *_: {"rows": [], "gaps": []})
    monkeypatch.setattr(ShapeCheck, "engine", lambda *_: {"rows": [], "left_out": ["batch 9"]})
    path, console = tmp_path / "gpu.json", Console(record=True)
    document = checked(path, console)
    assert not document["passed"]
    assert document["verdict"] == [
        "tiny verify broke down: RuntimeError: CUDA error: an illegal memory access"
    ]
    assert "breaks" in document["sections"]["tiny verify"]["traceback"]
    assert document["sections"]["tiny drafting"]["rows"]
    assert document["sections"]["tiny engine"]["left_out"] == ["batch 9"]
    assert document["profiles"] == {}, "a profile without its grid is none"
    assert "FAILED: RuntimeError: CUDA error" in console.export_text()


@pytest.mark.usefixtures("right")
def test_what_is_done_is_saved_before_the_next_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    seen: list[set[str]] = []

    def stops(*_: object) -> dict[str, Any]:
        seen.append(set(json.loads(path.read_text(encoding="utf-8"))["sections"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(ShapeCheck, "drafting", stops)
    with pytest.raises(KeyboardInterrupt):
        checked(path)
    assert seen == [{"attention", "tokens", "tiny load", "tiny verify"}]


@pytest.mark.usefixtures("right")
def test_a_shape_that_does_not_fit_is_left_out_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_check, "free_bytes", lambda _: 100_000)
    document = checked(tmp_path / "gpu.json")
    assert document["passed"], "nothing is wrong with a small machine"
    assert "of weights" in document["sections"]["tiny load"]["skipped"]
    assert list(document["sections"]) == ["attention", "tokens", "tiny load"]


def test_batches_that_do_not_fit_take_shorter_prompts_or_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = shape_check.Plan(TINY.grids, (1, 8), (1024, 64))
    one = ShapeCheck(SHAPES["tiny"], plan, torch.float32, CPU, Rates(1.0, 1.0))
    one.load()
    token = 2 * 2 * 2 * 16 * 4 + 2 * 1 * 2 * 16 * 4
    room = 1400.0 * token / 0.7
    monkeypatch.setattr(shape_check, "free_bytes", lambda _: int(room))
    context, backend = one._backend(1)
    assert context == 64
    assert backend.config.target_blocks * 16 <= 1400
    with pytest.raises(Room, match="8 requests do not fit"):
        one._backend(8)
    monkeypatch.setattr(shape_check, "free_bytes", lambda _: int(2 * room))
    assert one._backend(1)[0] == 1024


def test_wrong_outputs_fail_and_missed_bars_do_not() -> None:
    right = {"passed": True}
    missed = {"rows": [], "bar": {"passed": False}}
    assert verdict({"attention": right, "tokens": right, "1b verify": missed}) == (True, [])
    passed, lines = verdict({"attention": {"passed": False}, "tokens": right})
    assert not passed
    assert lines == ["attention is not right on this device"]
    assert not verdict({"attention": right})[0], "what was never checked is not right"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "no device 'tpu'; choose cuda or cpu"),
        (["--device", "cpu", "--shape", "70b"], "no shape '70b'; choose of 1b, 8b, tiny"),
        (["--device", "cpu", "--minutes", "0"], "minutes must be above 0"),
        (["--device", "cpu", "--json", "/no/such/folder/x.json"], "cannot write /no/such/folder"),
    ],
)
def test_odd_options_are_one_line(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app(), options)
    assert done.exit_code == 1
    assert f"parlay gpu-check: {said}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_default_says_what_to_do() -> None:
    done = CliRunner().invoke(app(), [])
    assert done.exit_code == 1
    assert "torch sees no GPU here; --device cpu" in done.stderr


def test_the_exit_code_is_that_of_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(names: list[str], device: torch.device, *_: object) -> dict[str, Any]:
        assert (names, device) == (["tiny"], CPU)
        return {"passed": False, "verdict": ["tokens is not right on this device"], "sections": {}}

    monkeypatch.setattr(main, "run_check", failed)
    done = CliRunner().invoke(app(), ["--device", "cpu", "--json", str(tmp_path / "x.json")])
    assert done.exit_code == 1
    assert "parlay gpu-check: tokens is not right on this device" in done.stderr
    assert "no picture" in done.stdout


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(cli.gpu_check)
    return made


BARE = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {
            "grpc", "google", "safetensors", "tokenizers", "transformers", "gguf", "jinja2",
            "matplotlib", "scipy", "pyarrow", "gymnasium",
        }:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Bare())
from parlay.engine.gpu_check.main import run_check
from parlay.engine.gpu_check.plot import plot
assert not plot({"sections": {}}, None)
"""


@pytest.mark.slow
def test_torch_numpy_and_rich_are_all_it_needs() -> None:
    subprocess.run([sys.executable, "-c", BARE], check=True)


def test_figures_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": float("nan"), "b": [[1.0, None]]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": None, "b": [[1.0, None]]}


@pytest.mark.slow
def test_the_command_checks_a_cpu_at_tiny_sizes(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "parlay.engine.gpu_check", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--minutes", "0.2", "--json", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["passed"]
    assert document["sections"]["tokens"]["passed"]
    assert path.with_suffix(".png").exists()
    assert load_costs(f"{path}#tiny").time(Work(1, 1, 1)).verify_ms > 0.0
