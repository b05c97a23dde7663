"""Start `parlay serve` as a process of its own, for commands that want a sidecar beside them.

`python -m parlay.engine.sidecar FOLDER POLICY` is that process. Its standard input is a pipe that
its parent holds open; once that closes, however the parent ended, the sidecar ends too.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

START_S = 30.0
"""A sidecar that does not listen by then has failed."""
END_S = 5.0
"""A sidecar that has not ended by then is killed."""
SOCKET = "sidecar.sock"


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
        socket = Path(folder) / SOCKET
        command = [sys.executable, "-m", "parlay.engine.sidecar", folder, policy]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
        )
        assert process.stdin is not None
        try:
            _await_socket(process, socket, errors)
            yield f"unix:{socket}", process.pid
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdin.close()


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


def _main(folder: str, policy: str) -> None:
    """Be the sidecar of `sidecar_process`."""
    orphaned = threading.Event()
    # Until `serve` has its own handler; by default the folder would stay.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    threading.Thread(target=_end_with_parent, args=(orphaned,), daemon=True).start()
    sys.argv[1:] = ["--listen", f"unix:{Path(folder) / SOCKET}", "--policy", policy]
    try:
        runpy.run_module("parlay.controller", run_name="__main__", alter_sys=True)
    finally:
        if orphaned.is_set():
            shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent(orphaned: threading.Event) -> None:
    os.read(0, 1)
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
