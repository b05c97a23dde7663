"""What HTTP gives and takes: a body up to a size, a stream of events, a client that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.types import Receive, Send

from parlay.engine.server.errors import ApiError

BODY_S = 30.0
"""A body that takes longer to come is given up."""
READ_ON = 16
"""Who still sends when refused may not see why: so many times the limit is read, and dropped."""


class Gone(Exception):
    """The client has closed its connection."""


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """Return a request's body; raises ApiError where it is too large or too slow, and Gone."""
    body, seen_bytes, more = bytearray(), 0, True
    try:
        async with asyncio.timeout(BODY_S):
            while more and seen_bytes <= READ_ON * limit_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                piece: bytes = message.get("body", b"")
                seen_bytes += len(piece)
                more = bool(message.get("more_body", False))
                if seen_bytes <= limit_bytes:
                    body += piece
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:.0f} s") from None
    if seen_bytes > limit_bytes:
        raise ApiError(413, f"the body has more than {limit_bytes} bytes")
    return bytes(body)


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; where the client goes away first, cancel it and raise Gone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(send: Send, events: AsyncIterator[bytes]) -> None:
    """Send a stream of server-sent events; a slow reader holds back only its own."""
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
