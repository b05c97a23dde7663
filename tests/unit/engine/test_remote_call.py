"""One stream's end: whoever hangs up waits for a writer that is at work, and for no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from parlay.engine.outbox import Outbox, Report
from parlay.engine.remote_call import SILENCE_S, Call


class Stream:
    """A stream that can be cancelled."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_writer_that_nobody_asks_any_more_is_not_waited_for() -> None:
    call = Call(stream=Stream())
    messages = call.writing(iter([b"hello", b"report"]))
    assert next(messages) == b"hello"
    began_s = time.monotonic()
    call.hang_up()
    assert time.monotonic() - began_s < 0.5 * SILENCE_S
    assert call.stream.cancelled


def test_a_writer_that_waits_for_a_report_is_waited_for() -> None:
    outbox, call, written = Outbox(), Call(stream=Stream()), list[bytes]()
    waits = threading.Event()

    def write() -> Iterator[bytes]:
        waits.set()
        while outbox.get() is not None:
            yield b"report"

    thread = threading.Thread(target=lambda: written.extend(call.writing(write())))
    thread.start()
    assert waits.wait(5.0)
    outbox.put(Report(0, None, None))
    threading.Timer(0.1, outbox.wake).start()
    call.hang_up()
    thread.join(5.0)
    assert written == [b"report"]
    assert call.at_rest.is_set()


def test_an_answer_is_overdue_only_where_one_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    now: Any = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    call = Call()
    now[0] += 10 * SILENCE_S
    assert not call.silent()
    call.ask()
    now[0] += 0.6 * SILENCE_S
    call.ask()
    now[0] += 0.6 * SILENCE_S
    assert call.silent()
    call.asked_s = None
    assert not call.silent()
