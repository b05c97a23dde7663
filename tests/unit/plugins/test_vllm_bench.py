"""What `parlay bench vllm` makes of the speeds it has measured."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from parlay.engine.plugins.vllm_bench import _decode, environment, report_of


def test_ours_is_held_against_the_best_of_each_load_and_the_best_single_way() -> None:
    report = report_of(
        {
            1: {"none": [10.0, 10.0], "ngram-8": [20.0, 20.0], "adaptive": [20.0, 24.0]},
            16: {"none": [80.0, 80.0], "ngram-8": [40.0, 40.0], "adaptive": [80.0, 80.0]},
        }
    )
    assert [r["best_other"] for r in report["rows"]] == ["ngram-8", "none"]
    assert [r["ratio"] for r in report["rows"]] == pytest.approx([1.1, 1.0])
    assert report["rows"][0]["round_ratios"] == pytest.approx([1.0, 1.2])
    # Both single ways come to the same over both loads: the geometric mean of 10 and 80.
    assert report["tuned_ratio"] == pytest.approx(2**0.5)
    assert report["ratio"] == pytest.approx((22.0 * 80.0 / 800.0) ** 0.5)


def test_so_many_run_at_once_until_each_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Ends its oldest request in every step."""

        def __init__(self) -> None:
            self.live: list[str] = []
            self.most, self.seen = 0, 0

        def add_request(self, name: str, prompt: Any, how: Any) -> None:
            self.live.append(name)
            self.most, self.seen = max(self.most, len(self.live)), self.seen + 1

        def step(self) -> list[Any]:
            self.live.pop(0)
            answer = SimpleNamespace(token_ids=[1, 2, 3])
            return [SimpleNamespace(finished=True, outputs=[answer])]

    fake = SimpleNamespace(SamplingParams=lambda **given: given)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    engine = Engine()
    assert _decode(engine, [("chat", [1])] * 7, 3, 3) > 0
    assert (engine.most, engine.seen, engine.live) == (3, 7, [])


def test_vllms_ngram_leaves_the_model_as_many_threads_as_were_asked_for() -> None:
    assert environment({"OMP_NUM_THREADS": "1"})["NUMBA_NUM_THREADS"] == "1"
    both = environment({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"})
    assert both["NUMBA_NUM_THREADS"] == "2"
    assert "NUMBA_NUM_THREADS" not in environment({})
