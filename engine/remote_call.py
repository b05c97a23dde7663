"""One stream to the sidecar, from its opening to its end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

SILENCE_S = 1.0
"""A call that owes an answer for so long is given up."""


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(slots=True)
class Call:
    """One stream; asked_s: when it was first asked something since its last answer, if it was.

    open: until it is hung up. welcomed, steered: it has said so, it has sent a plan. draining: the
    sidecar asked for its end. superseded: another engine has taken our id. at_rest: set while its
    writer is not at work.
    """

    channel: grpc.Channel | None = None
    stream: Any = None
    open: bool = True
    welcomed: bool = False
    steered: bool = False
    draining: bool = False
    superseded: bool = False
    asked_s: float | None = None
    at_rest: threading.Event = field(default_factory=_set)

    @property
    def leaving(self) -> bool:
        """Say whether nothing more is to be written."""
        return self.draining or not self.open

    def writing(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Pass messages on, and know whether one is being waited for: gRPC may just stop asking."""
        while True:
            self.at_rest.clear()
            try:
                message = next(messages, None)
            finally:
                self.at_rest.set()
            if message is None:
                return
            yield message

    def ask(self) -> None:
        """Note that something was asked which is to be answered."""
        self.asked_s = self.asked_s or time.monotonic()

    def silent(self) -> bool:
        """Say whether an answer is overdue."""
        return time.monotonic() - (self.asked_s or math.inf) > SILENCE_S

    def cancel(self) -> None:
        """End the stream, if it was opened."""
        if self.stream is not None:
            self.stream.cancel()

    def hang_up(self) -> None:
        """End the stream, wait for its writer a moment, and let go of the connection."""
        self.cancel()
        if self.stream is not None:
            self.at_rest.wait(SILENCE_S)
        if self.channel is not None:
            self.channel.close()
