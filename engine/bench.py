"""Contenders that take turns prompt by prompt; the memory floor, and what a wider pass costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from parlay.engine.backend import Batch, Drafts, Lookup
from parlay.engine.demo.bar import Bar
from parlay.engine.kv_cache import BlockCache
from parlay.engine.request import Request
from parlay.engine.torch_backend import TorchBackend

BUFFER_BYTES = 1 << 30
VERIFY_WIDTHS = (1, 2, 4, 8)
VERIFY_CONTEXT = 128


@dataclass(slots=True, frozen=True)
class Timing:
    """One request: seconds to its first token and to its last, and how many there were."""

    ttft_s: float
    total_s: float
    tokens: int

    @property
    def tpot_s(self) -> float:
        """Return seconds a token after the first."""
        return (self.total_s - self.ttft_s) / max(self.tokens - 1, 1)


@dataclass(slots=True, frozen=True)
class Contender:
    """An engine in one mode: decodes a prompt greedily up to so many tokens."""

    engine: str
    mode: str
    decode: Callable[[list[int], int, str], Timing]


def interleave(
    contenders: Sequence[Contender],
    prompts: Sequence[tuple[str, list[int]]],
    output_tokens: int,
    rounds: int,
    bar: Bar,
) -> list[list[Timing]]:
    """Let every contender decode every (task, prompt), each first as often as the others.

    Return each one's times, prompt by prompt, in the order of the rounds. bar: counts answers.
    """
    timings: list[list[Timing]] = [[] for _ in contenders]
    for contender in contenders:  # warms caches and lazy set-up
        contender.decode(prompts[0][1], 4, prompts[0][0])
    for number in range(rounds):
        for index, (task, ids) in enumerate(prompts):
            for turn in range(len(contenders)):
                who = (turn + number + index) % len(contenders)
                bar.start(f"round {number + 1}: {contenders[who].engine} {contenders[who].mode}")
                timings[who].append(contenders[who].decode(ids, output_tokens, task))
                bar.advance(1)
    return timings


def tokens_per_s(timings: Sequence[Timing]) -> float:
    """Return all tokens over all time, of requests that ran one after another."""
    return sum(t.tokens for t in timings) / sum(t.total_s for t in timings)


def read_bandwidth() -> float:
    """Return bytes a second that one pass over a 1 GiB buffer reads; the best of ten."""
    buffer = torch.ones(BUFFER_BYTES // 8, dtype=torch.int64)
    best_s = float("inf")
    for _ in range(10):
        start_s = time.perf_counter()
        buffer.sum()
        best_s = min(best_s, time.perf_counter() - start_s)
    return BUFFER_BYTES / best_s


def floor(weight_bytes: int) -> dict[str, Any]:
    """Return the shortest step that reading every weight once allows."""
    bandwidth = read_bandwidth()
    return {
        "weight_bytes": weight_bytes,
        "read_bytes_per_s": bandwidth,
        "step_ms": 1e3 * weight_bytes / bandwidth,
        "how": "int64 torch.sum over 1 GiB, the best of 10, on as many threads as the engine has",
    }


def verify_widths(backend: TorchBackend, repeats: int) -> Mapping[str, Mapping[str, float]]:
    """Return by width (tokens verified at batch 1) a pass's median ms and its ratio to 1."""
    request = Request(1, [100 + i for i in range(VERIFY_CONTEXT)], VERIFY_CONTEXT)
    config = backend.config
    target = BlockCache(config.target_blocks, config.block_tokens)
    target.reserve(1, VERIFY_CONTEXT + max(VERIFY_WIDTHS))
    draft = BlockCache(config.draft_blocks, config.block_tokens)
    nothing = Lookup(np.zeros(1, np.int32), np.full((1, 1), -1, np.int64))

    def verify(chunk: int, k: int) -> float:
        batch = Batch([request], np.asarray([chunk], np.int32), target, draft, nothing)
        drafts = Drafts(
            count=np.asarray([k], np.int32),
            tokens=np.full((1, max(k, 1)), 100, np.int64),
            confidences=np.full((1, max(k, 1)), np.nan, np.float32),
            read_by_draft=np.full(1, -1, np.int32),
        )
        return backend.verify(batch, drafts, np.asarray([k], np.int32)).verify_ms

    verify(VERIFY_CONTEXT, 0)
    request.computed = VERIFY_CONTEXT - 1  # what follows overwrites the places behind this one
    for width in VERIFY_WIDTHS:
        verify(1, width - 1)
    times: dict[int, list[float]] = {w: [] for w in VERIFY_WIDTHS}
    for _ in range(repeats):
        for width in VERIFY_WIDTHS:
            times[width].append(verify(1, width - 1))
    ms = {w: median(t) for w, t in times.items()}
    return {str(w): {"ms": ms[w], "ratio": ms[w] / ms[1]} for w in VERIFY_WIDTHS}
