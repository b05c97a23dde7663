from __future__ import annotations

import pytest
from tests.tiny import tiny_backend

from parlay.engine import bench
from parlay.engine.bench import Contender, Tally, Timing, interleave


def test_row() -> None:
    tally = Tally([Timing(0.1, 1.1, 11), Timing(0.3, 2.3, 11), Timing(0.2, 0.2, 1)])
    row = tally.row(Contender("parlay", "none", lambda *_: Timing(0, 0, 0)))
    assert (row["engine"], row["mode"], row["concurrency"]) == ("parlay", "none", 1)
    assert row["tokens_per_s"] == pytest.approx(23 / 3.6)
    assert row["ttft_ms"] == pytest.approx(200)
    assert row["tpot_ms"] == pytest.approx(100)


def test_contenders_take_turns_and_each_is_first() -> None:
    calls: list[str] = []

    def contender(name: str) -> Contender:
        def decode(ids: list[int], tokens: int, task: str) -> Timing:
            calls.append(name)
            return Timing(0.1, 0.2, tokens)

        return Contender(name, "none", decode)

    prompts = [("chat", [1]), ("code", [2])]
    done: list[int] = []
    tallies = interleave(
        [contender("a"), contender("b")], prompts, 7, 2, on_done=lambda: done.append(1)
    )
    assert calls == [*"ab", *"ab", *"ba", *"ba", *"ab"]  # the first two warm up and do not count
    assert [len(t.timings) for t in tallies] == [4, 4]
    assert tallies[0].timings[0].tokens == 7
    assert len(done) == 8


def test_verify_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "VERIFY_CONTEXT", 40)
    widths = bench.verify_widths(tiny_backend(vocab=400), repeats=2)
    assert list(widths) == ["1", "2", "4", "8"]
    assert widths["1"]["ratio"] == 1
    assert all(w["ms"] > 0 for w in widths.values())
