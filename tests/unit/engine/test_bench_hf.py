"""transformers as a peer of `parlay bench engine`: padded batches, lengths and ends of text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny_hf import tiny_pair

from parlay.engine import bench_hf
from parlay.engine.bench_hf import SCHEDULES, _waves, scheduled

PROMPTS = [[4, 5, 6, 7, 4, 5], [8, 9], [5, 6, 7]]
LENGTHS = [7, 3, 5]


def job(concurrency: int, eos_ids: list[int]) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "prompts": PROMPTS,
        "lengths": LENGTHS,
        "eos_ids": eos_ids,
    }


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_pair(eos_token_id=None)


@pytest.mark.parametrize("concurrency", [1, 2, 16])
def test_every_request_has_its_length(pair: tuple[Any, Any], concurrency: int) -> None:
    said = _waves(pair[0], job(concurrency, []), {})
    assert said["tokens"] == LENGTHS
    for ttft_s, total_s in zip(said["ttft_s"], said["total_s"], strict=True):
        assert 0 < ttft_s < total_s <= said["seconds"]


def test_an_end_of_text_ends_its_request_only(pair: tuple[Any, Any]) -> None:
    model = pair[0]
    plain = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=7, do_sample=False)
    output = plain[0, len(PROMPTS[0]) :].tolist()
    end = output[1]
    alone = _waves(model, job(1, [end]), {})["tokens"]
    assert alone[0] == output.index(end) + 1 < LENGTHS[0]
    assert _waves(model, job(16, [end]), {})["tokens"] == alone


def test_a_batch_is_over_when_its_last_request_is(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair[0]
    plain = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=7, do_sample=False)
    end = plain[0, len(PROMPTS[0])].item()  # what the request of most tokens says first
    widths: list[int] = []
    generate = model.generate

    def watched(**kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = generate(**kwargs)
        widths.append(out.shape[1] - kwargs["input_ids"].shape[1])
        return out

    monkeypatch.setattr(model, "generate", watched)
    said = _waves(model, job(16, [end]), {})
    assert widths == [max(said["tokens"])]
    assert widths[0] < max(LENGTHS)


@pytest.mark.parametrize("mode", ["confidence", "heuristic", "lookup"])
def test_speculation_is_timed_token_by_token(pair: tuple[Any, Any], mode: str) -> None:
    model, draft = pair
    extra = (
        {"prompt_lookup_num_tokens": 4}
        if mode == "lookup"
        else {"assistant_model": scheduled(draft, *SCHEDULES[mode])}
    )
    said = _waves(model, job(1, []), extra)
    assert said["tokens"] == LENGTHS


def test_all_modes_are_named_as_the_report_names_engines() -> None:
    assert {engine for engine, _ in bench_hf.MODES} == {"hf", "hf_assisted", "hf_prompt_lookup"}
