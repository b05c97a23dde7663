import io

import pytest
from rich.console import Console
from rich.progress import BarColumn, TextColumn

from parlay.sim import bar as module
from parlay.sim.bar import Bar

COLUMNS = (TextColumn("{task.description}"), BarColumn())


def test_where_nothing_is_drawn_lines_say_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    out = io.StringIO()
    with Bar(Console(file=out), *COLUMNS) as bar:
        line = bar.add("tuning")
        for _ in range(8):
            now_s[0] += 7.0
            bar.update(line, "mixed", total=8.0, advance=1)
        bar.print("a table")
    assert capsys.readouterr().err.splitlines() == ["mixed: 38%", "mixed: 75%"]
    assert out.getvalue().strip() == "a table"


def test_what_has_no_total_is_named_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "TELL_S", -1.0)
    with Bar(Console(file=io.StringIO()), *COLUMNS) as bar:
        bar.update(bar.add("tuning"), advance=1)
    assert capsys.readouterr().err == "tuning\n"


def test_a_terminal_has_bars_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "TELL_S", -1.0)
    out = io.StringIO()
    with Bar(Console(file=out, force_terminal=True, width=60), *COLUMNS) as bar:
        bar.update(bar.add("mixed", 4.0), advance=1)
    assert "mixed" in out.getvalue()
    assert capsys.readouterr().err == ""
