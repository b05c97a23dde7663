"""Who runs in the next step: continuous batching with chunked prefill. Free of torch.

Decoding requests come first, then prompts in order of arrival share what is left of the token
budget; one that begins as another did takes the blocks that hold that beginning. Where blocks are
short the newest request is preempted: its blocks go back, its tokens stay, and what of them is not
found again is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from parlay.engine.kv_cache import BlockCache
from parlay.engine.request import FinishReason, Phase, Request
from parlay.policies.types import Array

DRAFT_WINDOW_TOKENS = 64
"""At k=4 the shipped draft, before it was trained on windows, accepted as much on chat as with
whole prompts, 4 to 7% less on code, edits and summaries; it starts at a fraction of the cost."""


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Sizes of the engine: requests at once, tokens a step, blocks of both KV caches, context.

    draft_window_tokens: a draft model that is further behind a request starts anew so many tokens
    before its end, and never sees what came earlier. draft_catch_up_tokens: how many tokens a step
    it reads of requests that it left alone for a while, all together. prefix_cache: requests share
    the target's blocks of tokens that they begin with; the draft's are each request's own.
    tree_width: how many guesses of one place a draft may hold; 1: drafts are chains. vocab_tokens:
    a prompt's ids are below it. overlap: plans are made while the target's pass of the step before
    runs, which is worth it where the backend's passes go on by themselves.
    """

    max_running: int = 16
    token_budget: int = 512
    block_tokens: int = 16
    target_blocks: int = 2048
    draft_blocks: int = 2048
    context_tokens: int = 8192
    draft_window_tokens: int = DRAFT_WINDOW_TOKENS
    draft_catch_up_tokens: int = 256
    prefix_cache: bool = True
    tree_width: int = 1
    vocab_tokens: int = 2**63
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name not in ("prefix_cache", "overlap") and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def positions(self) -> int:
        """Return how long prompt and output of one request can be together."""
        return min(self.context_tokens, self.target_blocks * self.block_tokens)


class Scheduler:
    """Holds every unfinished request and the block tables of both models."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.target = BlockCache(config.target_blocks, config.block_tokens)
        self.draft = BlockCache(config.draft_blocks, config.block_tokens)
        self._blocked = (0, 0)

    @property
    def has_work(self) -> bool:
        """Say whether any request is unfinished."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self) -> tuple[list[Request], Array]:
        """Choose the next step's rows and each one's chunk i32; target blocks are reserved."""
        chunks: dict[int, int] = {}
        budget = self.config.token_budget
        for request in sorted(self.running, key=lambda r: r.pending > 1):
            if request.phase is Phase.RUNNING and (chunk := min(request.pending, budget)) > 0:
                if self._make_room(request, chunk, chunks):
                    chunks[request.request_id] = chunk
                budget = self.config.token_budget - sum(chunks.values())
        while self.waiting and budget > 0 and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            known = self._admitted(request)
            if known is None:
                break
            request.computed = self.target.adopt(request.request_id, known)
            if not request.preemptions:
                request.cached_tokens = request.computed
            chunk = min(request.pending, budget)
            self.target.reserve(request.request_id, request.computed + chunk)
            self.waiting.popleft()
            request.phase = Phase.RUNNING
            self.running.append(request)
            chunks[request.request_id] = chunk
            budget -= chunk
        rows = [r for r in self.running if r.request_id in chunks]
        return rows, np.asarray([chunks[r.request_id] for r in rows], np.int32)

    def _admitted(self, request: Request) -> list[int] | None:
        """Return the known blocks that a request begins with; None: it has to wait."""
        target, running = self.target, len(self.running)
        # Nothing else lets a request in: blocks that came free, or that it shares with one that
        # runs. Where there were too few, a long prompt is not looked up again in every step.
        spare = target.free + target.prefixes.revivals - running
        if running and self._blocked[0] == request.request_id and spare < self._blocked[1]:
            return None
        known: list[int] = []
        if self.config.prefix_cache:
            # Logits come from computing: the last token is never found.
            most = (len(request.tokens) - 1) // target.block_tokens
            known = target.prefixes.find(request.tokens, most)
        shared = sum(target.prefixes.refs[block] > 0 for block in known)
        # All of it must fit, not this chunk, with a spare block a running request: what is
        # preempted before it yields a token was computed for nothing.
        need = target.blocks_for(len(request.tokens)) - shared
        if running and need + running > target.free:
            self._blocked = request.request_id, need + target.prefixes.revivals
            return None
        return known

    def _make_room(self, request: Request, chunk: int, chunks: dict[int, int]) -> bool:
        """Reserve a chunk's blocks, preempting the newest; False: `request` was the newest."""
        while not self.target.reserve(request.request_id, request.computed + chunk):
            newest = self.running[-1]
            self.preempt(newest)
            chunks.pop(newest.request_id, None)
            if newest is request:
                return False
        return True

    def draft_lag(self, request: Request) -> int:
        """Return how many tokens the draft model must read before it drafts for a request."""
        return min(len(request.tokens) - request.draft_computed, self.config.draft_window_tokens)

    def reserve_draft(self, request: Request, k: int) -> int:
        """Take draft blocks for a request's unread tokens and k drafts; return the k that fits."""
        behind, tokens = self.draft_lag(request), len(request.tokens)
        if request.draft_computed < tokens - behind:
            self.draft.release(request.request_id)
            request.draft_computed = request.draft_start = tokens - behind
        held = tokens - request.draft_start
        k = min(k, self.draft.room(request.request_id) - held)
        return k if k > 0 and self.draft.reserve(request.request_id, held + k) else 0

    def settle(self, request: Request) -> None:
        """After a step, give back the blocks of rejected drafts; others may share what is full."""
        if self.config.prefix_cache:
            self.target.settle(request.request_id, request.tokens, request.computed)
        else:
            self.target.truncate(request.request_id, request.computed)
        self.draft.truncate(request.request_id, request.draft_computed - request.draft_start)

    def forget(self) -> None:
        """Compute everything again: others wrote to the caches, and what they held is gone."""
        for request in self.running[::-1]:
            self.preempt(request)
        self.target.forget()

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away; it keeps its tokens and goes first in the queue."""
        self._release(request)
        request.phase, request.computed = Phase.WAITING, 0
        request.draft_computed = request.draft_start = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out for good, wherever it is."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is Phase.RUNNING:
            if self.config.prefix_cache:
                self.target.settle(request.request_id, request.tokens, request.computed)
            self._release(request)
        request.phase, request.finish_reason = Phase.FINISHED, reason

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.target.release(request.request_id)
        self.draft.release(request.request_id)
