"""`parlay serve` as a process, for tests that harm it; only ever ended by its own id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from parlay.engine.bench_memory import resident_mb

WAIT_S = 30.0
FIXED = ("--policy", "fixed", "--set", "proposer=ngram", "--set", "k=4")


class Sidecar:
    """A sidecar at `listen`, started anew at the same address as often as asked.

    page: the URL of its page, where it has one; errors: what it has written to stderr.
    """

    def __init__(
        self, listen: str, *options: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self.target, self._options = listen, options
        self._environ = dict(os.environ) | dict(environ or {})
        self.page, self.errors = "", list[str]()
        self.start()

    def start(self) -> None:
        """Start a process and wait until it serves."""
        command = [sys.executable, "-m", "parlay.controller", "--listen", self.target]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*command, *self._options], stdout=pipe, stderr=pipe, text=True, env=self._environ
        )
        # A pipe that nobody reads would stop the sidecar once it is full.
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        while "serving on" not in (line := self.process.stdout.readline()):
            assert "page on" in line, self.errors
            self.page = line.split()[-1]
        self.target = line.split()[3]

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.errors.append(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process, frozen or not; return its exit status."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(number)
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return self.process.returncode

    def resident_mb(self) -> float:
        """Return the memory that the process holds, MB."""
        found = resident_mb(self.pid)
        assert found is not None
        return found


def count(pid: int, what: str) -> int:
    """Return how many open files (`fd`) or threads (`task`) a process has."""
    return len(os.listdir(f"/proc/{pid}/{what}"))


@contextmanager
def running(
    listen: str, *options: str, environ: Mapping[str, str] | None = None
) -> Iterator[Sidecar]:
    """Run a sidecar for as long as the block lasts; it must not have said that it failed."""
    sidecar = Sidecar(listen, *options, environ=environ)
    try:
        yield sidecar
    finally:
        if sidecar.process.stdout is not None and not sidecar.process.stdout.closed:
            sidecar.stop()
    errors = "".join(sidecar.errors)
    assert "Traceback" not in errors, errors
