"""transformers as a peer of `parlay bench engine`: a process that answers as `bench_vllm` does."""

from __future__ import annotations

import time
from typing import Any

import torch

from parlay.engine.bench_vllm import DecodeJob, Json, serve

HF, ASSISTED, PROMPT_LOOKUP = "hf", "hf_assisted", "hf_prompt_lookup"
MODES = {
    (HF, "none"): "padded batches",
    (ASSISTED, "confidence"): "up to 20 tokens, confidence .4",
    (ASSISTED, "heuristic"): "5 tokens, +2 or -1",
    (PROMPT_LOOKUP, "ngram"): "10 tokens",
}
"""What of generate takes part, and how it is set: transformers' own schedules, at its defaults."""
SCHEDULES = {"confidence": (20, "constant", 0.4), "heuristic": (5, "heuristic", 0.0)}
"""By mode: tokens, their schedule, the confidence below which drafting stops."""
_LOOKUP_TOKENS = 10


class _Clock:
    """A streamer for generate: notes when tokens came, and how many a row by then."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, then new tokens: one a row, or several [1, n] of the only row."""
        if self._prompt:
            self._prompt = False
            return
        new = value.shape[-1] if value.dim() == 2 else 1
        self.at_s += [time.perf_counter()] * new

    def end(self) -> None:
        """Nothing to flush."""


def open_hf(settings: Json) -> tuple[Json, DecodeJob]:
    """Load the model, and its draft when somebody first asks for assistance.

    settings: model, dtype, threads. A load's `engine` and `mode` are a key of MODES.
    """
    import transformers  # slow to import

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(settings["threads"])
    auto, kind = transformers.AutoModelForCausalLM, getattr(torch, settings["dtype"])
    model = auto.from_pretrained(settings["model"], dtype=kind).eval()
    drafts: dict[str, Any] = {}

    def decode(job: Json) -> Json:
        extra: Json = {}
        if job["engine"] == ASSISTED:
            from parlay.engine.plugins.hf_shipped import shipped_draft

            if not drafts:
                drafts["shipped"] = shipped_draft(model)
            extra["assistant_model"] = scheduled(drafts["shipped"], *SCHEDULES[job["mode"]])
        elif job["engine"] == PROMPT_LOOKUP:
            extra["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        return _waves(model, job, extra)

    return {"version": transformers.__version__}, decode


def scheduled(draft: Any, tokens: int, schedule: str, confidence: float) -> Any:
    """Start the draft's own schedule; it goes on from request to request of a load."""
    config = draft.generation_config
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = schedule
    config.assistant_confidence_threshold = confidence
    return draft


def _waves(model: Any, job: Json, extra: Json) -> Json:
    """Decode batch by batch: generate lets nobody in before the longest of a batch has ended."""
    size, count = job["concurrency"], len(job["prompts"])
    answer: Json = {"ttft_s": [], "total_s": [], "tokens": []}
    start_s = time.perf_counter()
    for at in range(0, count, size):
        prompts, lengths = job["prompts"][at : at + size], job["lengths"][at : at + size]
        for ttft_s, total_s, tokens in _batch(model, prompts, lengths, job["eos_ids"], extra):
            answer["ttft_s"].append(ttft_s)
            answer["total_s"].append(total_s)
            answer["tokens"].append(tokens)
    return {"seconds": time.perf_counter() - start_s, **answer}


def _batch(
    model: Any, prompts: list[list[int]], lengths: list[int], eos_ids: list[int], extra: Json
) -> list[tuple[float, float, int]]:
    """Return each prompt's seconds to its first token and to its last, and how many there were."""
    from transformers import StoppingCriteriaList

    width = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    most = torch.tensor(lengths)
    clock, start_s = _Clock(), time.perf_counter()

    def ended(sequences: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return sequences.shape[1] - width >= most

    # One request has its length from max_new_tokens, which speculation also drafts by.
    criteria = StoppingCriteriaList([ended] if len(prompts) > 1 else [])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(lengths),
            do_sample=False,
            eos_token_id=eos_ids or None,
            pad_token_id=0,
            streamer=clock,
            stopping_criteria=criteria,
            **extra,
        )
    counts = [
        _count(row, length, eos_ids)
        for row, length in zip(out[:, width:].tolist(), lengths, strict=True)
    ]
    return [(clock.at_s[0] - start_s, clock.at_s[n - 1] - start_s, n) for n in counts]


def _count(tokens: list[int], length: int, eos_ids: list[int]) -> int:
    """Return how many of a row's tokens are output, its end-of-text among them, not padding."""
    ends = [i + 1 for i, t in enumerate(tokens[:length]) if t in eos_ids]
    return min([*ends, length, len(tokens)])


if __name__ == "__main__":
    serve(open_hf)
