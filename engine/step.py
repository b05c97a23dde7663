"""The step loop: schedule -> plan -> propose -> verify -> commit -> report. Free of torch.

Read `Engine._step` first, then `_step_overlapped`, which decides while the target's pass runs; the
rest of the engine is what their lines call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from parlay.engine.backend import Backend, Batch, Drafts, Verified
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
from parlay.policies.types import (
    Array,
    BatchView,
    Fitted,
    Plan,
    PlanSource,
    Proposer,
    StepOutcome,
    Truncated,
)

if TYPE_CHECKING:
    from parlay.engine.stats_hub import StatsHub

__all__ = ["Engine", "EngineConfig"]


@dataclass(slots=True)
class Turn:
    """One step on its way: `plan` and what it was fitted to, `drafts`, each filled as it comes."""

    batch: Batch
    view: BatchView
    start_s: float
    plan: Plan | None = None
    source: PlanSource = PlanSource.DEFAULT
    fit: Fitted = field(init=False)
    drafts: Drafts = field(init=False)


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
        self._ahead: tuple[Plan | None, PlanSource] | None = None
        self._untold: StepOutcome | None = None

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
            if not self.has_work:
                self._tell()

    def step(self) -> StepOutcome | None:
        """Run one step over every scheduled request; None where there is nothing to do."""
        return self._step_overlapped() if self.config.overlap else self._step()

    def _step(self) -> StepOutcome | None:
        """Decide, then decode: the policy has heard of every step before this one."""
        turn = self._schedule()
        if turn is None:
            return None
        turn.plan, turn.source = self.planner.plan(turn.view)
        self._propose(turn)
        verified = self.backend.verify(turn.batch, turn.drafts, turn.fit.verify_k)
        committed = self._commit(turn, verified)
        outcome = self._outcome(turn, verified, committed)
        self.planner.observe(outcome)
        self._deliver(turn, committed, outcome)
        return outcome

    def _step_overlapped(self) -> StepOutcome | None:
        """Decide while decoding: the plan was made during the last step's pass, from what was known
        before it, and during this one's the policy hears of the last step and makes the next plan.
        """  # noqa: D205
        turn = self._schedule()
        if turn is None:
            self._tell()
            return None
        turn.plan, turn.source = self._ahead or self.planner.plan(turn.view)
        self._propose(turn)
        flying = self.backend.launch(turn.batch, turn.drafts, turn.fit.verify_k)
        try:
            self._tell()
            self._ahead = self.planner.plan(turn.view)
        finally:
            verified = self.backend.land(flying)
        committed = self._commit(turn, verified)
        outcome = self._untold = self._outcome(turn, verified, committed)
        if not self.has_work:
            self._tell()
        self._deliver(turn, committed, outcome)
        return outcome

    def _schedule(self) -> Turn | None:
        """Choose the step's rows, and say what of them may be known before it."""
        start_s = self.backend.clock() if self._idle else self._step_end_s
        if not self.backend.keeps(self.scheduler.target):
            self.scheduler.forget()
        requests, chunk = self.scheduler.schedule()
        self._idle = not requests
        if not requests:
            return None
        lookup = self.backend.lookup(requests, self.limits.k_max)
        batch = Batch(requests, chunk, self.scheduler.target, self.scheduler.draft, lookup)
        return Turn(batch, view_of(batch, self.scheduler, self.limits, self.step_id), start_s)

    def _propose(self, turn: Turn) -> None:
        """Draft as the plan has it, as far as blocks and matches go."""
        batch, view, plan = turn.batch, turn.view, turn.plan
        turn.fit = fit = self._reserve(batch, fit_plan(plan, view), plan)
        batch.shadow_k = self._watch(batch, fit, view)
        batch.heads_k = self.shadow.asks_heads(batch.requests, view, fit)
        turn.drafts = drafts = self.backend.propose(batch, fit, plan)
        if drafts.count.any():
            assert plan is not None
            fit.verify_k = verify_plan(plan, fit, drafts.count, drafts.confidences)
            drafts.trees = self._trees(batch, fit, drafts, plan)

    def _commit(self, turn: Turn, verified: Verified) -> Committed:
        """Grow the requests by what holds, and give back the blocks of what does not."""
        batch, requests = turn.batch, turn.batch.requests
        own = turn.fit.proposer == Proposer.NGRAM
        self.shadow.offer(requests, batch.lookup, batch.emits & ~own)
        self.shadow.watch(requests, turn.drafts.watched)
        self.shadow.watch(requests, turn.drafts.heads_watched, Proposer.MEDUSA)
        committed = commit(batch, turn.drafts, verified, self.rules)
        self._settle(batch, committed)
        return committed

    def _outcome(self, turn: Turn, verified: Verified, committed: Committed) -> StepOutcome:
        """Say what the step did and how long it took."""
        shadow = self.shadow.score(turn.batch.requests, verified.overlaps)
        self._step_end_s = self.backend.clock()
        step_ms = 1e3 * (self._step_end_s - turn.start_s)
        return outcome_of(
            turn.view, turn.plan, turn.source, turn.fit, turn.drafts, verified, committed, shadow,
            step_ms,
        )  # fmt: skip

    def _tell(self) -> None:
        """Let the policy hear of the last step, and forget the plan that was made before it."""
        if self._untold is not None:
            untold, self._untold, self._ahead = self._untold, None, None
            self.planner.observe(untold)

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
            if request.finished:
                continue  # aborted while the pass ran: its blocks are free
            if reason := FINISH.get(Truncated(committed.truncated_by[row])):
                self.scheduler.finish(request, reason)
                self.backend.forget(request)
            else:
                self.scheduler.settle(request)

    def _deliver(self, turn: Turn, committed: Committed, outcome: StepOutcome) -> None:
        """Hand the new tokens out, last of all: a callback may abort or add requests.

        One that raises ends its own request; the error is raised once the others have their tokens.
        """
        requests = turn.batch.requests
        if self.stats is not None:
            self.stats.stepped(
                requests, turn.view, turn.plan, turn.source, outcome, self._step_end_s
            )
        self.step_id += 1
        errors: list[Exception] = []
        for request, emitted in zip(requests, committed.emitted, strict=True):
            aborted = request.finish_reason is FinishReason.ABORT
            if emitted and request.on_tokens and not aborted:
                try:
                    request.on_tokens(request, request.tokens[-emitted:])
                except Exception as error:
                    self.abort(request)
                    errors.append(error)
        self._idle = not self.has_work
        if errors:
            raise errors[0]
