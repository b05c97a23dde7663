"""The `parlay` command: finds subcommands by entry point and loads only the one asked for.

A command is an entry point in the group `parlay.commands`: `demo`, or `bench.rpc` for `parlay bench
rpc`. It is a function with typer's annotations, or a typer app.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer

from parlay.policies.policy import Entry, entry_of, every_policy

GROUP = "parlay.commands"
_HELP = {
    "doctor": "Check an installation end to end and say what is wrong.",
    "demo": "Decode real prompts under the sidecar and compare with fixed settings.",
    "engine": "Serve a model over HTTP as OpenAI's API does, speculating adaptively.",
    "evaluate": "Estimate from a decision log what other policies would have earned.",
    "explain": "Say why a request got its plan.",
    "gpu-check": "Check the engine on this GPU, and measure its passes and policies.",
    "generate": "Generate text for one prompt.",
    "serve": "Run the policy sidecar.",
    "admin.activate": "Make a policy active on a running sidecar.",
    "admin.canary": "Let a policy decide for a share of the requests, or for blocks of steps.",
    "admin.describe": "Describe a policy of a running sidecar, and what was measured of it.",
    "admin.drain": "Take a sidecar out: no new streams, open ones end.",
    "admin.list": "List a running sidecar's policies and where they stand.",
    "admin.promote": "Make a candidate active if it is measured to be faster.",
    "admin.rollback": "Go back to the policy that decided before.",
    "admin.shadow": "Let a policy decide beside the active one, without effect.",
    "admin.snapshot": "Write down what a running sidecar has learned.",
    "bench.decide": "Time the policies' decisions.",
    "bench.engine": "Time plain decoding, and verifying several tokens at once.",
    "bench.hf": "Time Hugging Face's generate, its own assistants and ours in it.",
    "bench.vllm": "Time vLLM with and without us, beside its own fixed k.",
    "bench.rpc": "Time what talking to the sidecar costs an engine step.",
    "calibrate.acceptance": "Fit how tasks accept from logs.",
    "calibrate.check": "Foretell policies' gains, then measure them.",
    "calibrate.trace": "Record what every proposer would have done on a model's answers.",
    "distill.draft": "Train a draft model on what the target generates.",
    "distill.medusa": "Train Medusa heads on what the target generates.",
    "lab": "Run policies on recorded answers, against tuned gates.",
    "log.export": "Write a decision log as CSV or JSON lines.",
    "log.head": "Show the first rows of a decision log.",
    "log.stats": "Sum a decision log up.",
    "policies.describe": "Say what a policy does, where it is from and what can be set.",
    "policies.list": "List the policies.",
    "stats": "Watch an engine's steps and requests.",
    "top": "Watch a running sidecar in the terminal.",
    "train": "Train a policy in the simulator.",
    "simulate": "Run policies on scenarios, without a model and without a GPU.",
}
"""One line a command, so that `parlay --help` imports none of them."""


def main() -> None:
    """Run the command line and exit with its status."""
    # As ctrl-C does, these let what was started end too; `parlay serve` has its own handlers.
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which is how nohup asks to go on
        signal.signal(signal.SIGHUP, _end)
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read our output has left, as `head` does; nor may the flush at exit complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        typer.echo(f"parlay: {error}", err=True)
        status = 1
    sys.exit(status)


def _end(number: int, _: Any) -> None:
    # A terminal that closes may send it twice, from the shell and from the kernel.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(128 + number)


class _ClosedOutput(io.TextIOBase):
    """In the place of a standard output that was closed: only who writes has a problem."""

    def write(self, _: str, /) -> int:
        raise OSError("standard output is closed")

    def fileno(self) -> int:
        raise OSError("standard output is closed")


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit status: 2 where there is no such command."""
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if list(argv) == ["--version"]:
        typer.echo(f"parlay {version('parlay')}")
        return 0
    path, rest = _split(argv, commands)
    if path in commands:
        return _call(commands[path], rest)
    inside = [name for name in commands if not path or name.startswith(path + ".")]
    if inside and (not rest or rest[0] in ("--help", "-h")):
        _list(path, inside)
        return 0
    asked = " ".join([*path.split("."), *rest[:1]]).strip()
    known = ", ".join(name.replace(".", " ") for name in sorted(inside or commands))
    typer.echo(f"parlay: unknown command '{asked}'; choose one of {known or 'none'}", err=True)
    return 2


def _split(argv: Sequence[str], commands: Iterable[str]) -> tuple[str, list[str]]:
    """Return the longest start of `argv` that names a command or a group of them, and the rest."""
    path, rest = "", list(argv)
    while rest and path not in commands:
        longer = f"{path}.{rest[0]}".lstrip(".")
        if not any(name == longer or name.startswith(longer + ".") for name in commands):
            break
        path = longer
        rest.pop(0)
    return path, rest


def _list(path: str, names: list[str]) -> None:
    program = " ".join(["parlay", *path.split(".")]).strip()
    typer.echo(f"usage: {program} COMMAND [OPTIONS]\n")
    if not path:
        typer.echo("Adaptive speculation for LLM decoding.\n")
    width = max(len(name) for name in names)
    for name in sorted(names):
        typer.echo(f"  {name.replace('.', ' '):{width}}  {_HELP.get(name, '')}".rstrip())
    typer.echo("\nparlay COMMAND --help says more about one of them.")


def _call(point: EntryPoint, rest: list[str]) -> int:
    """Load a command and run it; what it cannot do is one line, without a traceback."""
    program = f"parlay {point.name.replace('.', ' ')}"
    try:
        loaded = point.load()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "parlay":
            raise
        typer.echo(f"{program}: {_missing(error.name)}", err=True)
        return 1
    app = loaded
    if not isinstance(loaded, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(loaded)
    try:
        typer.main.get_command(app)(args=rest, prog_name=program)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except ValueError as error:
        typer.echo(f"parlay: {' '.join(str(error).split())}", err=True)
        return 1
    return 0


def _missing(module: str | None) -> str:
    return f"this needs the module {module}: install it with pip install 'parlay[engine]'"


def policies_list() -> None:
    """List the policies."""
    known = every_policy()
    width = max(len(name) for name in known)
    for name, entry in sorted(known.items()):
        typer.echo(f"{name:{width}}  {_about(entry)[0]}")


def policies_describe(name: Annotated[str, typer.Argument(help="A name from the list.")]) -> None:
    """Say what a policy does, where it is from and what can be set."""
    entry = entry_of(name)
    typer.echo("\n".join(_about(entry)))
    settings = dataclasses.fields(entry.settings)
    if not settings:
        typer.echo("\nsettings: none")
        return
    typer.echo(f"\nsettings: {inspect.getdoc(entry.settings)}")
    for field in settings:
        typer.echo(f"  {field.name} = {_shown(field.default)}")


def doctor(
    config: Annotated[Path | None, typer.Option(help="The file of parlay serve --config.")] = None,
    sidecar: Annotated[str | None, typer.Option(help="Its address, if not the file's.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint's folder.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Only its plugin: vllm, huggingface or sglang.")
    ] = None,
) -> None:
    """Check an installation end to end; exit status 1 where something is wrong."""
    from parlay.policies.doctor import Asked, Verdict, examine

    failed = 0
    for found in examine(Asked(config, sidecar, model, engine)):
        failed += found.verdict is Verdict.FAIL
        mend = f"\n     {'':12} -> {found.mend}" if found.mend else ""
        typer.echo(f"{found.verdict:4} {found.what:12} {found.text}{mend}")
    if failed:
        raise typer.Exit(1)


def _about(entry: Entry) -> list[str]:
    """Return the lines of the docstring of the module that a policy is in."""
    text = inspect.getdoc(inspect.getmodule(entry.make)) or ""
    return text.splitlines() or [""]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    main()
