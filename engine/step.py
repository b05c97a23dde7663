"""The step loop: schedule -> plan -> propose -> verify -> commit -> report. Free of torch.

Read `Engine.step` first; the rest of the engine is what its lines call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from parlay.engine.backend import Backend, Batch, Drafts
from parlay.engine.branches import least_worth, trees_of_drafts
from parlay.engine.commit import FINISH, Committed, Detokenize, StopRules, commit
from parlay.engine.planner import Planner
from parlay.engine.report import outcome_of, view_of
from parlay.engine.request import (
    FinishReason,
    OnTokens,
    Request,
    SamplingParams,
    SpeculationParams,
    token_ids,
)
from parlay.engine.scheduler import EngineConfig, Scheduler
from parlay.engine.shadow import ShadowScorer
from parlay.engine.tree import MOST_NODES, Trees
from parlay.policies.allocate import fit_plan, verify_plan
from parlay.policies.types import Array, BatchView, Fitted, Plan, Proposer, StepOutcome, Truncated

if TYPE_CHECKING:
    from parlay.engine.stats_hub import StatsHub

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """Decodes requests on a backend, a step at a time, speculating as its planner says."""

    def __init__(
        self,
        backend: Backend,
        planner: Planner,
        config: EngineConfig | None = None,
        detokenize: Detokenize | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.backend = backend
        self.planner = planner
        self.config = config or EngineConfig()
        self.scheduler = Scheduler(self.config)
        self.shadow = ShadowScorer()
        self.limits = backend.limits()
        self.rules = StopRules(frozenset(eos_ids), self.config.positions, detokenize)
        self.step_id = 0
        self.stats: StatsHub | None = None
        self._ids = itertools.count(1)
        self._idle, self._step_end_s = True, 0.0

    @property
    def has_work(self) -> bool:
        """Say whether `step` has anything to do."""
        return self.scheduler.has_work

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Request:
        """Queue a prompt of token ids; raises ValueError where it cannot be, or does not fit."""
        positions, sampling = self.config.positions, sampling or SamplingParams()
        prompt = token_ids(prompt, self.config.vocab_tokens)
        if len(prompt) >= positions:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but the context holds {positions}"
                " with at least one of output: shorten the prompt"
            )
        if sampling.stop and self.rules.detokenize is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        speculation = speculation or SpeculationParams()
        request = Request(next(self._ids), prompt, len(prompt), sampling, speculation, on_tokens)
        self.scheduler.add(request)
        if self.stats is not None:
            self.stats.arrived(request, self.backend.clock())
        return request

    def abort(self, request: Request) -> None:
        """End a request now; its blocks are free at once."""
        if not request.finished:
            self.scheduler.finish(request, FinishReason.ABORT)
            self.backend.forget(request)
            self.shadow.forget(request.request_id)

    def step(self) -> StepOutcome | None:
        """Run one step over every scheduled request; None where there is nothing to do."""
        start_s = self.backend.clock() if self._idle else self._step_end_s
        if not self.backend.keeps(self.scheduler.target):
            self.scheduler.forget()
        requests, chunk = self.scheduler.schedule()
        self._idle = not requests
        if not requests:
            return None
        lookup = self.backend.lookup(requests, self.limits.k_max)
        batch = Batch(requests, chunk, self.scheduler.target, self.scheduler.draft, lookup)
        view = view_of(batch, self.scheduler, self.limits, self.step_id)

        plan, source = self.planner.plan(view)
        fit = self._reserve(batch, fit_plan(plan, view), plan)
        batch.shadow_k = self._watch(batch, fit, view)
        batch.heads_k = self.shadow.asks_heads(requests, view, fit)
        drafts = self.backend.propose(batch, fit, plan)
        if drafts.count.any():
            assert plan is not None
            fit.verify_k = verify_plan(plan, fit, drafts.count, drafts.confidences)
            drafts.trees = self._trees(batch, fit, drafts, plan)
        verified = self.backend.verify(batch, drafts, fit.verify_k)
        self.shadow.offer(requests, lookup, batch.emits & (fit.proposer != Proposer.NGRAM))
        self.shadow.watch(requests, drafts.watched)
        self.shadow.watch(requests, drafts.heads_watched, Proposer.MEDUSA)
        committed = commit(batch, drafts, verified, self.rules)
        self._settle(batch, committed)

        shadow = self.shadow.score(requests, verified.overlaps)
        self._step_end_s = self.backend.clock()
        step_ms = 1e3 * (self._step_end_s - start_s)
        outcome = outcome_of(view, plan, source, fit, drafts, verified, committed, shadow, step_ms)
        self.planner.observe(outcome)
        if self.stats is not None:
            self.stats.stepped(requests, view, plan, source, outcome, self._step_end_s)
        self.step_id += 1
        try:
            self._deliver(batch, committed)
        finally:
            self._idle = not self.has_work
        return outcome

    def _reserve(self, batch: Batch, fit: Fitted, plan: Plan | None) -> Fitted:
        """Take blocks for the drafts; where they are short, k shrinks, and trees first of all."""
        for row in np.flatnonzero(fit.k):
            request = batch.requests[row]
            tokens, k = len(request.tokens), int(fit.k[row])
            k = min(k, batch.target.room(request.request_id) - tokens)
            if fit.proposer[row] == Proposer.DRAFT_MODEL:
                k = self.scheduler.reserve_draft(request, k)
            fit.k[row] = fit.verify_k[row] = k = max(k, 0)
            batch.target.reserve(request.request_id, tokens + k)
        width = self.config.tree_width
        for row in np.flatnonzero(fit.k) if width > 1 and least_worth(plan) < np.inf else ():
            request = batch.requests[row]
            nodes = min(int(fit.k[row]) * width, MOST_NODES)
            batch.target.reserve(request.request_id, len(request.tokens) + nodes)
        fit.proposer[fit.k == 0] = Proposer.NONE
        return fit

    def _trees(self, batch: Batch, fit: Fitted, drafts: Drafts, plan: Plan | None) -> Trees | None:
        """Return what is verified instead of chains, None where those are best."""
        if not drafts.branches:
            return None
        room = [batch.target.capacity(r.request_id) - len(r.tokens) for r in batch.requests]
        return trees_of_drafts(drafts, fit, plan, np.asarray(room))

    def _watch(self, batch: Batch, fit: Fitted, view: BatchView) -> Array:
        """Take blocks for what the draft model guesses only to be observed; return i32 [rows]."""
        rows = fit.shadow & (fit.proposer != Proposer.DRAFT_MODEL)
        asked = self.shadow.asks(
            batch.requests, view.max_k, rows & view.allows(Proposer.DRAFT_MODEL)
        )
        for row in np.flatnonzero(asked):
            asked[row] = self.scheduler.reserve_draft(batch.requests[row], int(asked[row]))
        return asked

    def _settle(self, batch: Batch, committed: Committed) -> None:
        """Give back the blocks of rejected drafts, and every block of what has finished."""
        for row, request in enumerate(batch.requests):
            if reason := FINISH.get(Truncated(committed.truncated_by[row])):
                self.scheduler.finish(request, reason)
                self.backend.forget(request)
            else:
                self.scheduler.settle(request)

    def _deliver(self, batch: Batch, committed: Committed) -> None:
        """Hand the new tokens out, last of all: a callback may abort or add requests.

        One that raises ends its own request; the error is raised once the others have their tokens.
        """
        errors: list[Exception] = []
        for request, emitted in zip(batch.requests, committed.emitted, strict=True):
            aborted = request.finish_reason is FinishReason.ABORT
            if emitted and request.on_tokens and not aborted:
                try:
                    request.on_tokens(request, request.tokens[-emitted:])
                except Exception as error:
                    self.abort(request)
                    errors.append(error)
        if errors:
            raise errors[0]
