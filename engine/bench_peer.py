"""A peer of `parlay bench engine`: a process that is started once and asked in JSON lines."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

START_S, LOAD_S = 900.0, 1800.0
_END_S = 5.0


class Peer:
    """The process, its standard error kept for when it fails.

    name and mend begin and end the line of the ValueError that says so; env: its environment.
    """

    def __init__(
        self,
        name: str,
        mend: str,
        command: Sequence[str],
        env: Mapping[str, str],
        settings: dict[str, Any],
    ) -> None:
        self.name, self._mend = name, mend
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env
        )
        try:
            self._send(settings)
        except ValueError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    def wait_ready(self) -> dict[str, Any]:
        """Return what it says of itself, once it is up."""
        about: dict[str, Any] = self._receive(START_S)["ready"]
        return about

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a load."""
        self._send(job)
        return self._receive(LOAD_S)

    def close(self) -> None:
        """End it; one that does not go is killed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("it ended") from None

    def _receive(self, most_s: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        # It answers one line to one, so that nothing else waits in the reader's buffer.
        if not select.select([out], [], [], most_s)[0]:
            raise self._failed(f"it said nothing for {most_s:.0f} s")
        line = out.readline()
        if not line:
            raise self._failed("it ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def _failed(self, what: str) -> ValueError:
        """Return the error; where the process did not say why, its log's last line does."""
        self._log.seek(0)
        lines = [t.strip() for t in self._log.read().decode(errors="replace").splitlines()]
        last = next((t for t in lines[::-1] if t), "")
        why = f" ({last})" if what.startswith("it ") and last else ""
        return ValueError(f"{self.name}: {what}{why}; {self._mend}")
