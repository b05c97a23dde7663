"""Start `parlay serve` as a process of its own, for commands that want a sidecar beside them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

START_S = 30.0
"""A sidecar that does not listen by then has failed."""


@contextmanager
def sidecar(policy: str) -> Iterator[str]:
    """Run `parlay serve` as a process on a Unix socket of its own; yields its address."""
    with sidecar_process(policy) as (target, _):
        yield target


@contextmanager
def sidecar_process(policy: str) -> Iterator[tuple[str, int]]:
    """Run a sidecar as `sidecar` does; yields its address and its process id."""
    with (
        tempfile.TemporaryDirectory(prefix="parlay-") as folder,
        tempfile.TemporaryFile() as errors,
    ):
        socket = Path(folder) / "sidecar.sock"
        command = [
            sys.executable,
            "-m",
            "parlay.controller",
            "--listen",
            f"unix:{socket}",
            "--policy",
            policy,
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            _await_socket(process, socket, errors)
            yield f"unix:{socket}", process.pid
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_socket(process: subprocess.Popen[bytes], socket: Path, errors: IO[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while not socket.exists():
        if process.poll() is not None:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            raise ValueError(
                f"the sidecar ended at once: {said[-1] if said else 'it said nothing'}"
            )
        if time.monotonic() > deadline_s:
            raise ValueError(f"the sidecar did not listen within {START_S:.0f} s")
        time.sleep(0.05)
