"""Commit what was verified: grow requests, crop at EOS, stop string or length. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parlay.engine.backend import Batch, Drafts, Verified
from parlay.engine.request import FinishReason, Request
from parlay.policies.types import Array, Truncated

Detokenize = Callable[[Sequence[int]], str]

RECENT_DECAY = 0.9
"""Weight of the past in a request's mean of emitted tokens a step: about its last ten steps."""


@dataclass(slots=True, frozen=True)
class StopRules:
    """What ends a request besides its limits: end-of-sequence ids, and text for stop strings."""

    eos_ids: frozenset[int]
    positions: int
    detokenize: Detokenize | None = None


@dataclass(slots=True)
class Committed:
    """What became of the rows: emitted i16 tokens, and what truncated each run (Truncated) u8."""

    emitted: Array
    truncated_by: Array


def commit(batch: Batch, drafts: Drafts, verified: Verified, rules: StopRules) -> Committed:
    """Append each row's accepted run and bring its KV marks up to date; nothing is freed here."""
    rows = len(batch)
    emitted, truncated = np.zeros(rows, np.int16), np.zeros(rows, np.uint8)
    emits, drafted = batch.emits, drafts.count
    if drafts.trees is not None:
        drafted = np.maximum(drafted, drafts.trees.counts)
    on_chain = verified.accepted if verified.on_chain is None else verified.on_chain
    for row, request in enumerate(batch.requests):
        request.computed += int(batch.chunk[row])
        if not emits[row]:
            continue
        run = int(verified.accepted[row]) + 1
        tokens = [int(t) for t in verified.tokens[row, :run]]
        kept, truncated[row] = _crop(request, tokens, rules)
        emitted[row] = kept
        request.draft_computed += drafts.caught_up.get(row, 0)
        if (read := int(drafts.read_by_draft[row])) >= 0:
            request.draft_computed = len(request.tokens) + min(int(on_chain[row]), read)
        request.tokens.extend(tokens[:kept])
        if row in verified.logprobs:
            request.logprobs += verified.logprobs[row][:kept]
        request.computed += kept - 1
        request.steps += 1
        request.drafted += int(drafted[row])
        request.accepted += int(verified.accepted[row])
        request.recent_accept += (1 - RECENT_DECAY) * (kept - request.recent_accept)
    return Committed(emitted, truncated)


def _crop(request: Request, tokens: list[int], rules: StopRules) -> tuple[int, Truncated]:
    """Return how many of `tokens` stay, and what ended the request, if anything did."""
    limit = min(request.remaining, rules.positions - len(request.tokens))
    for index, token in enumerate(tokens, 1):
        if token in rules.eos_ids and not request.sampling.ignore_eos:
            return index, Truncated.EOS
        if request.sampling.stop and _hits_stop(request, tokens[:index], rules):
            return index, Truncated.STOP
        if index == limit:
            return index, Truncated.LENGTH
    return len(tokens), Truncated.NONE


def _hits_stop(request: Request, run: list[int], rules: StopRules) -> bool:
    """Say whether the text of the output's tail and `run` holds a stop string ending in `run`."""
    assert rules.detokenize is not None
    # A token has at least one byte, and a character at most four of them.
    reach = 4 * max(len(s) for s in request.sampling.stop) + 4
    tail = (request.output[-reach:] + run)[-reach - len(run) :]
    text = rules.detokenize(tail)
    return any(stop in text for stop in request.sampling.stop)


FINISH = {
    Truncated.EOS: FinishReason.STOP,
    Truncated.STOP: FinishReason.STOP,
    Truncated.LENGTH: FinishReason.LENGTH,
}
