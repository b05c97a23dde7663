"""One batch of the keyed fast loop: its policy sees and hears what it would behind the engine."""

from __future__ import annotations

import numpy as np

from parlay.policies.allocate import fit_plan, verify_plan
from parlay.policies.types import (
    DRAFT_MODEL,
    Array,
    BatchView,
    PlanSource,
    ShadowRows,
    StepOutcome,
    Truncated,
    task_id,
)
from parlay.sim.backend import SimBackend, drafted
from parlay.sim.episode import BLOCK_TOKENS, PLENTY_BLOCKS
from parlay.sim.fast import FastLoop
from parlay.sim.fast_price import Stepped
from parlay.sim.feed import Feed
from parlay.sim.keyed_luck import KeyedLuck
from parlay.sim.noted import NotedPlanner
from parlay.sim.tally import Episode, Tally

_LENGTH = int(Truncated.LENGTH)


class Seat:
    """One batch: where its requests come from, who plans for it, and what came of it."""

    def __init__(
        self,
        loop: FastLoop,
        luck: KeyedLuck,
        batch: int,
        planner: NotedPlanner,
        feed: Feed,
        steps: int,
    ) -> None:
        self.loop, self.luck, self.batch = loop, luck, batch
        self.backend: SimBackend = luck.backends[batch]
        self.planner, self.feed = planner, feed
        warm_up = feed.scenario.warm_up_steps
        self.tally = Tally(Episode(), warm_up, steps, feed.served(steps))
        self.over = False
        self.rows = np.zeros(0, np.intp)
        self._all = np.flatnonzero(loop.batch == batch)
        self._hash = np.array([task_id(tag) for tag in luck.names], np.uint32)
        self._edges = np.asarray(self.backend.engine.bucket_edges, np.int32)

    def admit(self) -> None:
        """Let in who comes before the next step."""
        if self.over:
            return
        backend, there = self.backend, self.luck.house[self.batch]
        # Those that ended in the last step still have their rows.
        rows = self._all[self.luck.number[self._all] > 0]
        there -= int((self.loop.output[rows] >= self.loop.length[rows]).sum())
        came, backend.time_s = self.feed.due(self.tally.step, backend.time_s, there)
        for arrival, arrived_s in came:
            number = self.luck.arrive(self.batch, arrival)
            self.tally.came(number, arrived_s, arrival.output_tokens)
        if not there and not came:
            assert self.feed.ended, "a loop always has work"
            self._leave()

    def begins(self) -> bool:
        """Take the rows that the step computes, in order of arrival; False: there are none."""
        rows = self._all[self.loop.chunk[self._all] > 0]
        self.rows = rows[np.argsort(self.luck.number[rows], kind="stable")]
        return bool(len(rows))

    def decided(self) -> tuple[Array, Array, Array, Array]:
        """Return proposer, passes, tokens kept and tokens verified [n] of the step's rows."""
        self.view = view = self._view()
        self.plan, self.source = self.planner.plan(view)
        self.fit = fit = fit_plan(self.plan, view)
        active = np.flatnonzero(fit.k)
        self.kept = passes = fit.k.astype(np.int32)
        self.confidences = np.full((len(view), 1), np.nan, np.float32)
        if len(active):
            at = self.rows[active]
            luck, where = self.backend.luck, (self.luck.row[at], self.loop.output[at])
            self.kept, passes, self.confidences = drafted(luck, active, *where, fit, self.plan)
        self.verified = self.kept
        if self.plan is not None:
            self.verified = verify_plan(self.plan, fit, self.kept, self.confidences)
        self.depth = int(passes[fit.proposer == DRAFT_MODEL].max(initial=0))
        return fit.proposer.astype(np.intp), passes, self.kept, self.verified

    def _view(self) -> BatchView:
        loop, rows = self.loop, self.rows
        n, limits, decodes = len(rows), self.backend.engine, loop.decodes[rows]
        running, held = self._running()
        lag = loop.lag[rows]
        return BatchView(
            request_id=self.luck.number[rows].astype(np.uint64),
            task=self._hash[loop.task[rows]],
            context_tokens=(loop.prompt[rows] + loop.output[rows]).astype(np.int32),
            output_tokens=loop.output[rows].astype(np.int32),
            prefill_tokens=np.where(decodes, 0, loop.chunk[rows]).astype(np.int32),
            temperature=np.zeros(n, np.float32),
            max_k=loop.max_k[rows].astype(np.int32),
            proposer_mask=np.full(n, limits.proposer_mask, np.uint8),
            tpot_target_ms=np.full(n, np.nan, np.float32),
            recent_accept=loop.recent[rows].astype(np.float32),
            match_tokens=loop.match[rows],
            draft_kv_lag=(lag if self.backend.catches_up else np.minimum(lag, 1)).astype(np.int32),
            seeded=np.zeros(n, bool),
            step_id=self.tally.step,
            running=running,
            waiting=self.luck.house[self.batch] - running,
            free_blocks=PLENTY_BLOCKS - held,
            total_blocks=PLENTY_BLOCKS,
            kv_tokens=int(loop.kv_tokens[self.batch]),
            bucket_edges=self._edges,
        )

    def _running(self) -> tuple[int, int]:
        """Return how many requests have begun, and the blocks that they hold."""
        loop, rows = self.loop, self._all
        prompt, pending, chunk = loop.prompt[rows], loop.pending[rows], loop.chunk[rows]
        computed = np.where(
            loop.decodes[rows], prompt + loop.output[rows], prompt - pending + chunk
        )
        begun = (loop.length[rows] > 0) & ((chunk > 0) | (pending < prompt))
        return int(begun.sum()), int((-(-computed[begun] // BLOCK_TOKENS)).sum())

    def learned(self, done: Stepped, before: Array, shadow: ShadowRows) -> None:
        """Let the clock run, and tell the policy and the tally what the step did."""
        backend, b = self.backend, self.batch
        start_s = backend.time_s
        draft_ms = done.draft_ms[:, b].astype(np.float32)
        backend.time_s += 1e-3 * float(draft_ms.sum())
        backend.time_s += 1e-3 * float(done.verify_ms[b] + self.loop.costs.overhead_ms[b])
        step_ms = 1e3 * (backend.time_s - start_s)
        outcome = self._outcome(done, before, shadow, draft_ms, step_ms)
        self.planner.observe(outcome)
        if self.tally.note(outcome, backend.time_s, self.planner):
            self._leave()

    def _outcome(
        self, done: Stepped, before: Array, shadow: ShadowRows, draft_ms: Array, step_ms: float
    ) -> StepOutcome:
        rows, view, fit, plan = self.rows, self.view, self.fit, self.plan
        emitted = done.emitted[rows]
        ends = before[rows] + emitted >= self.loop.length[rows]
        followed = np.where(fit.follows, int(self.source), int(PlanSource.DEFAULT))
        return StepOutcome(
            request_id=view.request_id,
            task=view.task,
            proposer=fit.proposer.astype(np.uint8),
            requested_k=fit.k.astype(np.int16),
            drafted_k=self.kept.astype(np.int16),
            verified_k=self.verified.astype(np.int16),
            accepted=done.accepted[rows].astype(np.int16),
            emitted=emitted.astype(np.int16),
            match_tokens=view.match_tokens,
            truncated_by=np.where(ends, _LENGTH, 0).astype(np.uint8),
            plan_source=followed.astype(np.uint8),
            plan_step_id=np.full(len(view), plan.step_id if plan else 0, np.uint64),
            confidences=self.confidences,
            shadow=shadow,
            step_id=view.step_id,
            padded_tokens=int(done.padded[self.batch]),
            prefill_tokens=int(view.prefill_tokens.sum()),
            kv_tokens=view.kv_tokens,
            draft_ms=draft_ms,
            draft_depth=self.depth,
            verify_ms=float(done.verify_ms[self.batch]),
            step_ms=step_ms,
        )

    def _leave(self) -> None:
        self.over = True
        self.luck.leave(self.loop, self.batch)
