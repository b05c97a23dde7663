"""A port that leads to another one, over a line that is late, noisy or cut whenever a test says."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import numpy as np

WAIT_S = 10.0


class FaultyLine:
    """Passes TCP connections on to `port`, from a thread of its own, until closed.

    delay_s: by how much what is sent arrives later, each way. damage: what becomes of each piece;
    None: nothing. Both may be changed at any time.
    """

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.damage: Callable[[bytes], bytes] | None = None
        self._to = port
        self._writers: set[asyncio.StreamWriter] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(WAIT_S)

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(server.sockets[0].getsockname()[1])
        started.set()
        await self._end.wait()
        server.close()
        self._abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        finally:
            for end in ends:
                end.transport.abort()
            self._writers -= ends

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.ensure_future(self._send(pieces, sink))
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    piece = data if self.damage is None else self.damage(data)
                    pieces.put_nowait((self._loop.time() + self.delay_s, piece))
            pieces.put_nowait((self._loop.time() + self.delay_s, b""))
            await sender
        finally:
            sender.cancel()

    async def _send(
        self, pieces: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, piece = await pieces.get()
                await asyncio.sleep(max(due_s - self._loop.time(), 0.0))
                if not piece:
                    return
                sink.write(piece)
                await sink.drain()
        # The other way ends with it.
        sink.close()

    def _abort(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def cut(self) -> None:
        """End every connection at once."""

        async def abort() -> None:
            self._abort()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(WAIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def flipping(seed: int, share: float) -> Callable[[bytes], bytes]:
    """Return a damage that changes one byte in this share of the pieces."""
    rng = np.random.default_rng(seed)

    def damage(piece: bytes) -> bytes:
        if rng.random() >= share:
            return piece
        broken = bytearray(piece)
        broken[int(rng.integers(len(broken)))] ^= int(rng.integers(1, 256))
        return bytes(broken)

    return damage


def garbage(seed: int) -> Callable[[bytes], bytes]:
    """Return a damage that leaves nothing but the length."""
    rng = np.random.default_rng(seed)
    return lambda piece: rng.bytes(len(piece))
