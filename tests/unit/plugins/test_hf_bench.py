"""What `parlay bench hf` reports, and its contenders on a tiny pair."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
import transformers
from rich.console import Console
from tests.tiny_hf import tiny_pair

from parlay.engine.bench import Contender, Timing, interleave
from parlay.engine.demo.bar import Bar
from parlay.engine.plugins.hf_bench import hf_contenders, report_of
from parlay.engine.plugins.huggingface import Speculator


def nobody(_: list[int], __: int, ___: str) -> Timing:
    raise AssertionError("not asked to decode")


def test_ours_is_held_against_the_best_other_round_by_round() -> None:
    contenders = [Contender("x", mode, nobody) for mode in ("slow", "fast", "ours")]
    seconds = ((2.0, 2.0, 2.0, 2.0), (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 0.5, 0.5))
    timings = [[Timing(0.0, s, 10) for s in row] for row in seconds]
    report = report_of(contenders, timings, prompts=2)
    assert [r["tokens_per_s"] for r in report["rows"]] == pytest.approx([5, 10, 40 / 3])
    assert report["best_other"] == "x fast"
    assert report["ratio"] == pytest.approx(4 / 3)
    assert report["round_ratios"] == pytest.approx([1, 2])


def test_every_contender_decodes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.utils.logging.set_verbosity_error()
    model, draft = tiny_pair(eos_token_id=None)
    texts: list[list[int]] = []
    generate = model.generate

    def watched(*args: object, **kwargs: object) -> torch.Tensor:
        out: torch.Tensor = generate(*args, **kwargs)
        texts.append(out[0].tolist())
        return out

    monkeypatch.setattr(model, "generate", watched)
    speculator = Speculator(model, draft, "fixed", {"proposer": "draft_model", "k": "3"})
    contenders = hf_contenders(model, draft, speculator)
    bar = Bar(Console(file=StringIO()), len(contenders))
    timings = interleave(contenders, [("code", [4, 5, 6, 7, 4, 5])], 12, 1, bar)
    assert [done[0].tokens for done in timings] == [12] * len(contenders)
    decoded = [tuple(t) for t in texts if len(t) == 18]
    assert len(decoded) == len(contenders)
    assert len(set(decoded)) == 1
    assert 0 < speculator.counters.steps < 12 + 4
    assert contenders[-1].engine == "hf_parlay"
