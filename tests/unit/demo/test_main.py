"""What the demo asks before its run, and that its figures outlive a plot that fails."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from parlay.engine.demo import main

FIGURES = {"fresh_share": 1.0, "engine_thread_us_p50": 10.0}


def test_the_plot_is_beside_the_json_and_asking_leaves_nothing(tmp_path: Path) -> None:
    assert main.picture_beside(tmp_path / "x.json") == tmp_path / "x.png"
    assert not list(tmp_path.iterdir())
    (tmp_path / "x.png").write_bytes(b"old")
    main.picture_beside(tmp_path / "x.json")
    assert (tmp_path / "x.png").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["x.png", "x.PNG"])
def test_the_json_may_not_take_the_plots_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the plot goes beside"):
        main.picture_beside(tmp_path / name)


def test_what_cannot_be_written_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.png").mkdir()
    with pytest.raises(ValueError, match=r"cannot write .*x\.png: name a file"):
        main.picture_beside(tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"cannot write .*x\.json: name a file in a folder"):
        main.picture_beside(tmp_path / "nowhere" / "x.json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parlay-demo.png").mkdir()
    with pytest.raises(ValueError, match=r"cannot write parlay-demo\.png"):
        main.demo_main("goodput", True, None, Console(file=io.StringIO()))


def test_figures_are_written_and_printed_before_the_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("cannot write the plot")

    backend = SimpleNamespace(config=None, target=SimpleNamespace(device=None))
    stubs: dict[str, Any] = {
        "default_model_dir": lambda: tmp_path,
        "load_backend": lambda: (backend, SimpleNamespace(eos_ids=(), chat=lambda _: [1])),
        "open_lanes": lambda *_: [],
        "run_demo": lambda *_: None,
        "sidecar_figures": lambda _: FIGURES,
        "compare": lambda _: SimpleNamespace(divergences=[]),
        "float32_copy": lambda *_: None,
        "TorchOracle": lambda *_: None,
        "judge": lambda *_: None,
        "report_of": lambda *_: {"identical": True},
        "print_report": lambda _, console: console.print("the tables"),
        "plot": fail,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(main, name, stub)
    out, file = io.StringIO(), tmp_path / "x.json"
    with pytest.raises(ValueError, match="cannot write the plot"):
        main.demo_main("goodput", True, file, Console(file=out))
    assert json.loads(file.read_text(encoding="utf-8"))["sidecar"] == FIGURES
    assert "the tables" in out.getvalue()
