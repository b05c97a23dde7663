from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from tests.tiny import tiny_backend

from parlay.engine import bench
from parlay.engine.bench import Contender, Timing, interleave, tokens_per_s
from parlay.engine.demo.bar import Bar


def test_speed_pools_requests() -> None:
    timings = [Timing(0.1, 1.1, 11), Timing(0.3, 2.3, 11), Timing(0.2, 0.2, 1)]
    assert tokens_per_s(timings) == pytest.approx(23 / 3.6)


def test_contenders_take_turns_and_each_is_first() -> None:
    calls: list[str] = []

    def contender(name: str) -> Contender:
        def decode(ids: list[int], tokens: int, task: str) -> Timing:
            calls.append(name)
            return Timing(0.1, 0.2, tokens)

        return Contender(name, "none", decode)

    prompts, console = [("chat", [1]), ("code", [2])], Console(file=StringIO())
    timings = interleave([contender("a"), contender("b")], prompts, 7, 2, Bar(console, 8))
    assert calls == [*"ab", *"ab", *"ba", *"ba", *"ab"]  # the first two warm up and do not count
    assert [len(done) for done in timings] == [4, 4]
    assert timings[0][0].tokens == 7


def test_verify_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "VERIFY_CONTEXT", 40)
    widths = bench.verify_widths(tiny_backend(vocab=400), repeats=2)
    assert list(widths) == ["1", "2", "4", "8"]
    assert widths["1"]["ratio"] == 1
    assert all(w["ms"] > 0 for w in widths.values())
