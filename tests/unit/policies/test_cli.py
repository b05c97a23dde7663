"""The `parlay` command: lazy commands, one clear line for what it cannot do."""

import os
import signal
import subprocess
import sys
import types
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from parlay.policies import cli


def trouble(flag: bool = False) -> None:
    """Fail."""
    raise ValueError("the port is in use:\n choose another" if flag else "it cannot be done")


def greet(name: str = "you") -> None:
    """Say hello."""
    print(f"hello {name}")


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("parlay_cli_probe")
    module.__dict__.update(trouble=trouble, greet=greet)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    points = {
        "greet": "parlay_cli_probe:greet",
        "bench.trouble": "parlay_cli_probe:trouble",
        "bench.absent": "parlay_no_such_module:main",
        "policies.list": "parlay.policies.cli:policies_list",
        "policies.describe": "parlay.policies.cli:policies_describe",
    }
    found = EntryPoints(EntryPoint(n, v, cli.GROUP) for n, v in points.items())
    monkeypatch.setattr(cli, "entry_points", lambda group: found)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_and_imports_none(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(argv) == 0
    out = capsys.readouterr().out
    for name in ("greet", "bench trouble", "bench absent", "policies list"):
        assert name in out


def test_the_version_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "version", lambda name: f"9.8 of {name}")
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == "parlay 9.8 of parlay\n"


def test_a_group_lists_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench"]) == 0
    out = capsys.readouterr().out
    assert "bench trouble" in out
    assert "greet" not in out


@pytest.mark.parametrize(
    ("argv", "asked"),
    [(["zap"], "'zap'"), (["bench", "zap"], "'bench zap'"), (["--zap"], "'--zap'")],
)
def test_an_unknown_command_is_one_line(
    argv: list[str], asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"parlay: unknown command {asked}; choose one of bench absent")
    assert err.count("\n") == 1


def test_a_command_gets_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["greet", "--name", "all"]) == 0
    assert capsys.readouterr().out == "hello all\n"
    assert cli.run(["greet", "--zap"]) == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [([], "it cannot be done"), (["--flag"], "the port is in use: choose another")],
)
def test_an_error_is_one_line_without_a_traceback(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "trouble", *argv]) == 1
    assert capsys.readouterr().err == f"parlay: {says}\n"


def test_a_missing_module_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "absent"]) == 1
    err = capsys.readouterr().err
    assert "parlay_no_such_module" in err
    assert "pip install" in err
    assert err.count("\n") == 1


def test_policies_are_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["policies", "list"]) == 0
    listed = capsys.readouterr().out
    assert {line.split()[0] for line in listed.splitlines()} >= {"none", "fixed", "goodput"}
    assert cli.run(["policies", "describe", "batch_table"]) == 0
    assert "up_to_running = 4,8,32" in capsys.readouterr().out
    assert cli.run(["policies", "describe", "none"]) == 0
    assert "settings: none" in capsys.readouterr().out
    assert cli.run(["policies", "describe", "zap"]) == 1
    assert "unknown policy 'zap'" in capsys.readouterr().err


def test_a_reader_who_leaves_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "from parlay.policies import cli; cli.run = lambda _: cli.policies_list() or 0"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; cli.main()"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("cli.policies_list()", 1),
        ("cli.typer.echo('x')", 1),
        ("pass", 0),  # who has nothing to say needs no output
    ],
)
def test_a_closed_output_is_one_line(lines: str, status: int) -> None:
    program = f"""
from parlay.policies import cli
def work(argv):
    {lines}
    return 0
cli.run = work
cli.main()
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, program],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert done.stderr == ("parlay: standard output is closed\n" if status else "")


@pytest.mark.parametrize(
    ("before", "status"),
    [
        ("signal.signal(signal.SIGHUP, signal.SIG_DFL)", 128 + signal.SIGHUP),
        ("signal.signal(signal.SIGHUP, signal.SIG_IGN)", 0),
    ],
)
def test_a_closed_terminal_lets_it_clean_up_unless_nohup_says_go_on(
    before: str, status: int
) -> None:
    program = f"""
import signal
from parlay.policies import cli
def work(argv):
    try:
        signal.raise_signal(signal.SIGHUP)
    finally:
        signal.raise_signal(signal.SIGHUP)
        print("cleaned up")
    return 0
{before}
cli.run = work
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "cleaned up\n", "")


def test_a_policy_that_needs_a_file_is_listed_described_and_named_to_who_errs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.policies_list()
    cli.policies_describe("learned")
    assert capsys.readouterr().out.count("A policy trained in the simulator") == 2
    with pytest.raises(ValueError, match="learned"):
        cli.policies_describe("zap")
