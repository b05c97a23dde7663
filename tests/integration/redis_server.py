"""Real Redis servers for tests: on free loopback ports, in a folder of their own, ended by pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import redis

BINARY = shutil.which("redis-server")
WAIT_S = 20.0


MOST_PORT = 55_000
"""A cluster's nodes talk on a port that is 10,000 higher."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) < MOST_PORT:
                return port


class RedisServer:
    """A redis-server process. Options are lines of its configuration."""

    def __init__(self, folder: Path, *options: str, port: int = 0, sentinel: bool = False) -> None:
        assert BINARY is not None
        self.port = port or free_port()
        self.folder = folder / str(self.port)
        self.folder.mkdir(exist_ok=True)
        self._tls = any(line.startswith("tls-port") for line in options)
        lines = [
            f"port {0 if self._tls else self.port}",
            *([] if sentinel else ['save ""', "appendonly no"]),
            "bind 127.0.0.1",
            f"dir {self.folder}",
            "logfile server.log",
            *(line.replace("PORT", str(self.port)) for line in options),
        ]
        self._config = self.folder / "redis.conf"
        self._config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._sentinel = sentinel
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        assert BINARY is not None
        command = [BINARY, str(self._config), *(["--sentinel"] if self._sentinel else [])]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + WAIT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            assert process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5.0)

    def ask(self, *command: str | int) -> Any:
        """Send a command; redis-py has no types for that."""
        return cast(Any, self.client()).execute_command(*command)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def restart(self) -> None:
        self.process = self._start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.kill()


@contextmanager
def running(folder: Path, *options: str, sentinel: bool = False) -> Iterator[RedisServer]:
    """Run a server for as long as the block lasts."""
    server = RedisServer(folder, *options, sentinel=sentinel)
    try:
        yield server
    finally:
        server.stop()
