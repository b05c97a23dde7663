"""A backend without a model: acceptance from hazards or a trace, time from a cost function.

The text of a request is a function of its id and position, and every coin flip is keyed by (seed,
request, position, proposer, place): policies that differ see the same flips, and output never
depends on speculation. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from parlay.engine.backend import Batch, Drafts, Lookup, Verified
from parlay.engine.kv_cache import BlockCache
from parlay.engine.request import Request
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Array, Fitted, Plan, Proposer

VOCAB = 50_000
_MASK, _GOLDEN, _ODD = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0x632BE59BD9B4E019


class Acceptance(Protocol):
    """What proposers could do: `offer` is a pure function of its arguments."""

    def offer(self, request: Request, proposer: Proposer, k: int) -> tuple[int, int, int]:
        """Return (tokens it can draft up to k, how many of them hold, its match length)."""
        ...


@dataclass(slots=True, frozen=True)
class Task:
    """One task's acceptance: P(place j holds | reached) by proposer, the last value repeating, and
    how often the n-gram finds a match.
    """  # noqa: D205

    accept: Mapping[Proposer, Sequence[float]]
    match_rate: float = 1.0
    match_tokens: int = 4


@dataclass(slots=True, frozen=True)
class Hazards:
    """Acceptance drawn position by position from each task's conditional probabilities."""

    tasks: Mapping[str, Task]
    seed: int = 0

    def offer(self, request: Request, proposer: Proposer, k: int) -> tuple[int, int, int]:
        """Flip the keyed coins of this request, position and proposer."""
        task = self.tasks[request.speculation.task]
        chain = task.accept.get(proposer, ())
        flips = self._flips(request, proposer, k + 1)
        if not chain or (proposer is Proposer.NGRAM and flips[0] >= task.match_rate):
            return 0, 0, 0
        chances = [chain[min(j, len(chain) - 1)] for j in range(k)]
        held = flips[1:] < chances
        return k, int(np.cumprod(held).sum()), task.match_tokens

    def _flips(self, request: Request, proposer: Proposer, count: int) -> Array:
        key = (self.seed * 1_000_003 + request.request_id) * 64 + int(proposer)
        bits = _hashed(key, len(request.tokens) << 32, count)
        return (bits >> np.uint64(11)) * 2.0**-53


@dataclass(slots=True, frozen=True)
class TraceRow:
    """One request of a counterfactual trace: by output position, what each proposer could draft and
    how much of it would hold, and the n-gram's match length.
    """  # noqa: D205

    drafted: Mapping[Proposer, Sequence[int]]
    accepted: Mapping[Proposer, Sequence[int]]
    match_tokens: Sequence[int]


@dataclass(slots=True, frozen=True)
class Trace:
    """Acceptance as recorded; request i of the engine replays row (i - 1) modulo their number."""

    rows: Sequence[TraceRow]

    def offer(self, request: Request, proposer: Proposer, k: int) -> tuple[int, int, int]:
        """Look the request's output position up."""
        row, at = self.rows[(request.request_id - 1) % len(self.rows)], request.output_tokens
        if proposer not in row.drafted or at >= len(row.drafted[proposer]):
            return 0, 0, 0
        count = min(k, row.drafted[proposer][at])
        return count, min(count, row.accepted[proposer][at]), row.match_tokens[at]


@dataclass(slots=True, frozen=True)
class StepCost:
    """Step time in ms: a fixed part, one a token up to and beyond a knee, KV, and drafting."""

    fixed_ms: float = 10.0
    token_ms: float = 0.3
    knee_tokens: int = 0
    beyond_knee_ms: float = 0.0
    kv_token_ms: float = 0.0
    draft_pass_ms: float = 1.0
    draft_token_ms: float = 0.05
    ngram_ms: float = 0.05

    def verify_ms(self, tokens: int, kv_tokens: int) -> float:
        """Return the time of a pass of the target."""
        beyond = max(0, tokens - self.knee_tokens) * self.beyond_knee_ms
        return self.fixed_ms + tokens * self.token_ms + beyond + kv_tokens * self.kv_token_ms


@dataclass(slots=True)
class VirtualBackend:
    """Keeps a virtual clock; `time_s` moves only in propose and verify."""

    acceptance: Acceptance
    cost: StepCost = field(default_factory=StepCost)
    engine: EngineLimits = field(default_factory=EngineLimits)
    time_s: float = 0.0

    def limits(self) -> EngineLimits:
        """Return what was set."""
        return self.engine

    def clock(self) -> float:
        """Return the virtual time."""
        return self.time_s

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def keeps(self, book: BlockCache) -> bool:
        """Say yes: nothing is kept that others could overwrite."""
        return True

    def lookup(self, requests: list[Request], depth: int) -> Lookup:
        """Return the n-gram's offers."""
        match = np.zeros(len(requests), np.int32)
        tokens = np.full((len(requests), depth), -1, np.int64)
        for row, request in enumerate(requests):
            if request.pending == 1:
                count, held, match[row] = self.acceptance.offer(request, Proposer.NGRAM, depth)
                match[row] *= count > 0
                tokens[row, :count] = _guesses(request, count, held)
        return Lookup(match, tokens)

    def propose(self, batch: Batch, fit: Fitted, plan: Plan | None) -> Drafts:
        """Offer each row's guesses: right up to where the flips say, wrong from there on."""
        depth = max(int(fit.k.max(initial=0)), 1)
        count, tokens = np.zeros(len(batch), np.int32), np.full((len(batch), depth), -1, np.int64)
        for row in np.flatnonzero(fit.k):
            request, proposer = batch.requests[row], Proposer(fit.proposer[row])
            count[row], held, _ = self.acceptance.offer(request, proposer, int(fit.k[row]))
            tokens[row, : count[row]] = _guesses(request, int(count[row]), held)
        modelled = (fit.proposer == Proposer.DRAFT_MODEL) & (fit.k > 0)
        # The last token drafted has not been read.
        read = np.where(modelled, np.maximum(count - 1, 0), -1).astype(np.int32)
        drafts = Drafts(count, tokens, np.full(tokens.shape, np.nan, np.float32), read)
        drafts.draft_depth = int(count[modelled].max(initial=0))
        passes = [int((count[modelled] > j).sum()) for j in range(drafts.draft_depth)]
        drafts.draft_ms[Proposer.DRAFT_MODEL] = sum(
            self.cost.draft_pass_ms + n * self.cost.draft_token_ms for n in passes
        )
        if ((fit.proposer == Proposer.NGRAM) & (count > 0)).any():
            drafts.draft_ms[Proposer.NGRAM] = self.cost.ngram_ms
        self.time_s += 1e-3 * float(drafts.draft_ms.sum())
        return drafts

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Accept guesses while they are the request's text; the bonus token is its next."""
        k = np.minimum(verify_k, drafts.count)
        accepted = np.zeros(len(batch), np.int32)
        tokens = np.full((len(batch), int(k.max(initial=0)) + 1), -1, np.int64)
        for row in np.flatnonzero(batch.emits):
            text = _text(batch.requests[row], int(k[row]) + 1)
            held = drafts.tokens[row, : k[row]] == text[: k[row]]
            accepted[row] = run = int(np.cumprod(held).sum())
            tokens[row, : run + 1] = text[: run + 1]
        padded = int(batch.chunk.sum() + k.sum())
        verify_ms = self.cost.verify_ms(padded, sum(r.computed for r in batch.requests))
        self.time_s += 1e-3 * verify_ms
        return Verified(accepted, tokens, padded, verify_ms)

    def launch(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Verify: nothing goes on by itself on a virtual clock."""
        return self.verify(batch, drafts, verify_k)

    def land(self, flying: Verified) -> Verified:
        """Return what was verified."""
        return flying


def _hashed(key: int, first: int, count: int) -> Array:
    """Return u64 [count]: SplitMix64's outputs from `first` on, of a stream named by key."""
    with np.errstate(over="ignore"):
        x = np.arange(first, first + count, dtype=np.uint64) + np.uint64(key * _ODD & _MASK)
        x = x * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _text(request: Request, count: int) -> Array:
    """Return the next `count` tokens of a request: a hash of its id and their positions."""
    bits = _hashed(request.request_id, len(request.tokens), count)
    return (bits % np.uint64(VOCAB)).astype(np.int64)


def _guesses(request: Request, count: int, held: int) -> Array:
    text = _text(request, count)
    text[held:] = (text[held:] + 1) % VOCAB
    return text
