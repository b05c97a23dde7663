"""Serve until told to stop: a bound socket, uvicorn on one event loop, and a drain at the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Generator

import uvicorn

from parlay.engine.server.app import Service

DRAIN_S = 30
"""How long requests may go on after SIGTERM before they are aborted."""


class HttpServer(uvicorn.Server):
    """Serves a service on a bound socket; `end` drains, a second `end` does not wait."""

    def __init__(self, service: Service, bound: socket.socket, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                service.app(),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        self.service, self._bound, self._ready = service, bound, ready
        service.worker.on_crash = self.end

    def end(self) -> None:
        """Take no more connections, finish what runs, and stop; the second time stop now."""
        self.force_exit |= self.should_exit
        self.should_exit = True

    async def run_until_ended(self) -> None:
        """Serve; SIGINT and SIGTERM end it where this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.end)
        self.service.worker.start()
        try:
            await self.serve(sockets=[self._bound])
        finally:
            await self.service.worker.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `run_until_ended`."""
        yield
