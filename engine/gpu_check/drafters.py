"""What drafting without a draft model takes: looking up n-grams, and Medusa heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from parlay.engine.gpu_check.floor import timed_ms
from parlay.engine.gpu_check.shapes import DRAFT_HEAD
from parlay.engine.medusa_heads import HeadsConfig, RootedHeads
from parlay.engine.models import Llama
from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.request import Request

HEADS = 4
_DEPTH = 8
_REPEATS = 10
_ALPHABET = 400
"""Tokens that the n-gram's text is made of: few enough that matches are found."""


@dataclass(slots=True, frozen=True)
class RowsCost:
    """What a step of a drafter takes: a fixed part, and one a row, in ms."""

    fixed_ms: float
    row_ms: float


def rows_cost(measure: Callable[[int], float], batches: Sequence[int]) -> RowsCost:
    """Return the line through the times of the smallest and the largest of at least two batches."""
    low, high = min(batches), max(batches)
    low_ms, high_ms = measure(low), measure(high)
    row_ms = max(high_ms - low_ms, 0.0) / (high - low)
    return RowsCost(max(low_ms - low * row_ms, 0.0), row_ms)


def ngram_ms(batch: int, context: int) -> float:
    """Return the median time of looking up `batch` texts of `context` tokens that grow by one."""
    rng = np.random.default_rng(batch)
    ngram, took = NgramProposer(), []
    requests = []
    for number in range(1, batch + 1):
        text = rng.integers(0, _ALPHABET, context).tolist()
        requests.append(Request(number, text, context))
        requests[-1].computed = context - 1
    ngram.lookup(requests, _DEPTH)
    for token in rng.integers(0, _ALPHABET, _REPEATS).tolist():
        for request in requests:
            request.tokens.append(token)
            request.computed += 1
        start_s = perf_counter()
        ngram.lookup(requests, _DEPTH)
        took.append(1e3 * (perf_counter() - start_s))
    return median(took)


class RandomHeads:
    """Medusa heads of random weights for a target: one block a cell, a trimmed output layer."""

    def __init__(self, target: Llama) -> None:
        config, device = target.config, target.device
        rows = min(DRAFT_HEAD, config.vocab)
        hidden, width = config.hidden, config.hidden
        sizes = HeadsConfig(
            hidden, HEADS, (1, 1), (width, width), (config.layers,), rows, config.norm_eps
        )
        self.target = target

        def drawn(*shape: int) -> Tensor:
            made = torch.empty(shape, dtype=target.dtype, device=device)
            return made.normal_(std=0.02) if len(shape) > 1 else made.fill_(1.0)

        weights = {name: drawn(*shape) for name, shape in sizes.tensor_shapes().items()}
        ids = torch.arange(rows)
        self.heads = RootedHeads(sizes, weights, target.embedding, drawn(rows, hidden), ids)

    def time_ms(self, batch: int) -> float:
        """Return the median time in which all heads guess for `batch` rows, greedily."""
        return timed_ms(self.target.device, lambda: self._run(batch), _REPEATS)

    @torch.inference_mode()
    def _run(self, batch: int) -> None:
        target = self.target
        states = torch.ones(batch, target.config.hidden, dtype=target.dtype, device=target.device)
        tokens = torch.zeros(batch, dtype=torch.int64, device=target.device)
        x = self.heads.begin(states)
        for place in range(HEADS):
            x, logits = self.heads.step(place, x, tokens)
            tokens = logits.argmax(-1)
        tokens.cpu()
