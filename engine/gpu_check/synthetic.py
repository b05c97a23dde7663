"""A real backend whose verdicts are synthetic: every pass runs, keyed coins say what holds.

With random weights nothing that a draft guesses would ever hold. So the models run as always, and
then their guesses and the target's tokens are replaced: the text of a request is a function of its
id and position, and a coin keyed by (request, position, proposer, place) says how much of a draft
is that text (`virtual.Hazards`). Modes that are compared meet the same coins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parlay.engine.backend import Batch, Drafts, Lookup, Verified
from parlay.engine.kv_cache import BlockCache
from parlay.engine.request import Request
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.virtual import Acceptance, Task
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Array, Fitted, Plan, Proposer, StopRule

MIX = {
    "chat": Task(
        {Proposer.NGRAM: (0.40, 0.50, 0.55), Proposer.DRAFT_MODEL: (0.60, 0.64, 0.70, 0.74, 0.78)},
        match_rate=0.20,
        match_tokens=3,
    ),
    "code": Task(
        {Proposer.NGRAM: (0.50, 0.62, 0.70, 0.75), Proposer.DRAFT_MODEL: (0.66, 0.70, 0.74, 0.78)},
        match_rate=0.30,
        match_tokens=4,
    ),
    "edit": Task(
        {Proposer.NGRAM: (0.75, 0.90, 0.93, 0.95, 0.96), Proposer.DRAFT_MODEL: (0.80,)},
        match_rate=0.75,
        match_tokens=8,
    ),
    "translate": Task(
        {Proposer.NGRAM: (0.20, 0.30), Proposer.DRAFT_MODEL: (0.45, 0.50, 0.55)},
        match_rate=0.05,
        match_tokens=2,
    ),
}
"""Tasks in equal parts: the simulator's, without what varies from request to request."""
_STEP = 7919


@dataclass(slots=True)
class Begun:
    """A verification; made: the real backend's, None where no pass was run. k i32 [rows]."""

    batch: Batch
    drafts: Drafts
    k: Array
    made: Any


@dataclass(slots=True)
class SyntheticBackend:
    """`inner` with the verdicts of `acceptance`; for greedy requests whose task that knows.

    Steps in which any row reads a prompt run no pass of the target, for no verdict depends on what
    it would write: their rows count as read by both models. They take next to no time, and are not
    to be measured.
    """

    inner: TorchBackend
    acceptance: Acceptance
    vocab: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.inner.medusa is None, "no coins are flipped for heads"
        self.vocab = self.inner.target.config.vocab

    def limits(self) -> EngineLimits:
        """Return what the real backend can do."""
        return self.inner.limits()

    def clock(self) -> float:
        """Return the real clock's time."""
        return self.inner.clock()

    def keeps(self, book: BlockCache) -> bool:
        """Say yes: what others write to the cache changes no verdict."""
        return True

    def forget(self, request: Request) -> None:
        """Drop what the real backend keeps."""
        self.inner.forget(request)

    def lookup(self, requests: list[Request], depth: int) -> Lookup:
        """Ask the real n-gram, for the time that takes, and say what the coins do."""
        self.inner.lookup(requests, depth)
        match = np.zeros(len(requests), np.int32)
        tokens = np.full((len(requests), depth), -1, np.int64)
        for row, request in enumerate(requests):
            if request.pending == 1:
                guess, match[row] = self._guess(request, Proposer.NGRAM, depth)
                match[row] *= len(guess) > 0
                tokens[row, : len(guess)] = guess
        return Lookup(match, tokens)

    def propose(self, batch: Batch, fit: Fitted, plan: Plan | None) -> Drafts:
        """Run the drafters, then take the coins' guesses instead of theirs.

        Those have no confidence, so that none ends early by it, and are the host's from the start:
        what hands a drafter's own on, unread, is in no time that is measured here.
        """
        if plan is not None and plan.stop_rule != StopRule():
            plan = replace(plan, stop_rule=StopRule())
        drafts = self.inner.propose(batch, fit, plan)
        drafts.unread.clear()
        drafts.confidences = np.full(drafts.tokens.shape, np.nan, np.float32)
        modelled = (fit.proposer == Proposer.DRAFT_MODEL) & (drafts.count > 0)
        for row in np.flatnonzero(modelled).tolist():
            count = int(drafts.count[row])
            guess, _ = self._guess(batch.requests[row], Proposer.DRAFT_MODEL, count)
            drafts.tokens[row, :count] = guess
        for row, seen in drafts.watched.items():
            guess, _ = self._guess(batch.requests[row], Proposer.DRAFT_MODEL, len(seen))
            drafts.watched[row] = guess.tolist()
        return drafts

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Run the target over chunks and drafts, and accept what is the request's text."""
        return self._land(self._begin(batch, drafts, verify_k, self.inner.verify), None)

    def launch(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Begun:
        """Begin what `verify` does."""
        return self._begin(batch, drafts, verify_k, self.inner.launch)

    def land(self, flying: Begun) -> Verified:
        """Wait for what was launched."""
        return self._land(flying, self.inner.land)

    def _begin(
        self, batch: Batch, drafts: Drafts, verify_k: Array, run: Callable[..., Any]
    ) -> Begun:
        assert drafts.trees is None, "coins are flipped along chains"
        decodes = batch.emits.all() and not (batch.chunk > 1).any()
        made = run(batch, drafts, verify_k) if decodes else None
        return Begun(batch, drafts, np.minimum(verify_k, drafts.count), made)

    def _land(self, begun: Begun, wait: Callable[..., Verified] | None) -> Verified:
        batch, drafts, k = begun.batch, begun.drafts, begun.k
        accepted = np.zeros(len(batch), np.int32)
        tokens = np.full((len(batch), int(k.max(initial=0)) + 1), -1, np.int64)
        for row in np.flatnonzero(batch.emits).tolist():
            text = self._text(batch.requests[row], int(k[row]) + 1)
            held = drafts.tokens[row, : k[row]] == text[: k[row]]
            accepted[row] = run = int(np.cumprod(held).sum())
            tokens[row, : run + 1] = text[: run + 1]
        if begun.made is None:
            _count_as_read(batch)
            return Verified(accepted, tokens, int(batch.chunk.sum() + k.sum()), 0.0)
        verified: Verified = begun.made if wait is None else wait(begun.made)
        verified.accepted, verified.tokens = accepted, tokens
        return verified

    def _guess(self, request: Request, proposer: Proposer, k: int) -> tuple[Array, int]:
        """Return what a proposer guesses, right up to where the coins say, and its match length."""
        count, held, match = self.acceptance.offer(request, proposer, k)
        text = self._text(request, count)
        text[held:] = (text[held:] + 1) % self.vocab
        return text, match

    def _text(self, request: Request, count: int) -> Array:
        """Return the next `count` tokens of a request."""
        place = len(request.tokens) + np.arange(count, dtype=np.int64)
        text: Array = (request.request_id * _STEP + place) % self.vocab
        return text


def _count_as_read(batch: Batch) -> None:
    """Let the draft model have read whole prompts too, as far as its blocks go."""
    for request, chunk in zip(batch.requests, batch.chunk.tolist(), strict=True):
        tokens = len(request.tokens)
        if request.computed + chunk == tokens and batch.draft.reserve(request.request_id, tokens):
            request.draft_computed, request.draft_start = tokens, 0
