"""Lines of the log that strangers cause: one a second of each kind, with a count of the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SAY_S = 1.0


class Seldom:
    """Says which of many lines of a kind go into the log: a flood of calls must not fill a disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next_s, self._left_out = clock, 0.0, 0

    def due(self) -> int | None:
        """Return how many lines were left out before this one, None where it is left out, too."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._left_out += 1
            return None
        before, self._left_out, self._next_s = self._left_out, 0, now_s + SAY_S
        return before


class StrangersText(logging.Filter):
    """Of gRPC's own lines about a peer's metadata that are no text, one a second without the bytes.

    Any peer can cause one a call, with a traceback, and the bytes may be most of a token.
    """

    def __init__(self, seldom: Seldom | None = None) -> None:
        super().__init__()
        self._seldom = seldom or Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record goes into the log."""
        if not str(record.msg).startswith("Invalid encoding"):
            return True
        record.msg, record.args, record.exc_info = "metadata of a call is no text", (), None
        return self._seldom.due() is not None
