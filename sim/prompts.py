"""Prompts with a text, so that the scheduler's prefix cache finds what they have in common.

A text here is numbers that are equal where prompts are and differ where they differ. What a trace
calls a block by the same hash is the same text (Mooncake: 512 tokens a hash); where only the length
of the shared part is known, that part is the beginning of one common text, of each task its own.
"""

from __future__ import annotations

import zlib

import numpy as np

from parlay.policies.types import Array
from parlay.sim.workload import BLOCK_TOKENS, Arrival

_PLACES = 1 << 24
"""No prompt is longer; leaves room for 2**38 texts."""
_TEXTS = 1 << 36


def prompt_of(arrival: Arrival, number: int) -> list[int]:
    """Return the tokens of the prompt of request `number`: its own text after the shared part."""
    shared, total = arrival.shared_prefix_tokens, arrival.prompt_tokens
    if arrival.blocks:
        text = np.asarray([hash(block) % _TEXTS for block in arrival.blocks], np.int64)
        own = (
            np.repeat(text * _PLACES, BLOCK_TOKENS)[:total]
            + np.arange(BLOCK_TOKENS * len(text))[:total]
        )
        tail = _text(2 * _TEXTS + number, len(own), total)
        return [*own.tolist(), *tail.tolist()]
    common = _text(_TEXTS + zlib.crc32(arrival.task.encode()), 0, shared)
    return [*common.tolist(), *_text(2 * _TEXTS + number, shared, total).tolist()]


def _text(name: int, start: int, stop: int) -> Array:
    """Return places start..stop of a text of its own."""
    return name * _PLACES + np.arange(start, stop)
