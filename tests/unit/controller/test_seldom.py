"""What strangers cause does not fill the log, and what is left out of it is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

import grpc
import pytest

from parlay.controller.host import Host
from parlay.controller.seldom import SAY_S, Seldom, StrangersText
from parlay.controller.service import Servicer
from parlay.policies.synthetic import History
from parlay.protos.codec import encode_report

REPORT = encode_report("nobody", History(2).step(None))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Refused(Exception):
    pass


class Context:
    """A call whose end is raised, as gRPC's is."""

    async def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        raise Refused(code, text)


def test_one_line_a_second_with_a_count_of_the_others() -> None:
    clock = Clock()
    seldom = Seldom(clock)
    assert [seldom.due() for _ in range(4)] == [0, None, None, None]
    clock.now_s += SAY_S
    assert [seldom.due() for _ in range(2)] == [3, None]
    clock.now_s += 10.0 * SAY_S
    assert seldom.due() == 1
    clock.now_s += SAY_S
    assert seldom.due() == 0


def test_a_flood_of_bad_calls_is_a_line_of_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    servicer, context = Servicer(Host("none")), Context()
    clock = Clock()
    servicer._seldom.default_factory = lambda: Seldom(clock)

    async def flood(calls: int) -> None:
        hostile: Any = context
        for _ in range(calls):
            with pytest.raises(Refused):
                await servicer.decide(b"\xff", hostile)
            with pytest.raises(Refused):
                await servicer.report(REPORT, hostile)

    with caplog.at_level(logging.WARNING, "parlay.controller"):
        asyncio.run(flood(500))
        assert len(caplog.records) == 2
        assert all("others_since_last_said=0" in line for line in caplog.messages)
        caplog.clear()
        clock.now_s += SAY_S
        asyncio.run(flood(1))
    codes = [line.split()[2] for line in caplog.messages]
    assert codes == ["code=INVALID_ARGUMENT", "code=NOT_FOUND"]
    assert all("others_since_last_said=499" in line for line in caplog.messages)


def test_a_failure_of_ours_is_said_with_where_it_was(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer = Servicer(Host("none"))
    context: Any = Context()

    def broken(*_: Any) -> Any:
        raise RuntimeError("nobody thought of it")

    monkeypatch.setattr(servicer.host, "session", broken)
    with caplog.at_level(logging.WARNING, "parlay.controller"), pytest.raises(Refused) as caught:
        asyncio.run(servicer.report(REPORT, context))
    assert caught.value.args[0] is grpc.StatusCode.INTERNAL
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_text_of_a_peer_that_is_none_is_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    clock, grpcs = Clock(), logging.getLogger("test.cygrpc")
    grpcs.addFilter(StrangersText(Seldom(clock)))

    def decoded(data: bytes) -> None:
        try:
            data.decode()
        except UnicodeDecodeError:
            grpcs.exception("Invalid encoding on %s", data)

    for _ in range(300):
        decoded(b"gr\xbec-python")
    clock.now_s += SAY_S
    decoded(b"gr\xbec-python")
    assert len(caplog.records) == 2
    assert "Traceback" not in caplog.text
    assert "python" not in caplog.text  # it may be most of a token
    try:
        raise RuntimeError("ours")
    except RuntimeError:
        grpcs.exception("Unexpected")
    assert "Traceback" in caplog.text
