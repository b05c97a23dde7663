"""A made-up batch that decodes as its plans say: what benchmarks and tests of the wire feed on.

Every draw is keyed by (seed, step), so that the same decisions make the same history.
"""

from __future__ import annotations

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits
from parlay.policies.types import (
    PROPOSERS,
    Array,
    BatchView,
    Fitted,
    Plan,
    PlanSource,
    Proposer,
    ShadowKind,
    ShadowRows,
    StepOutcome,
    Truncated,
)

OUTPUT_TOKENS = 120
TASKS = 4
LIMITS = EngineLimits(proposer_mask=0b0111, k_max=8, token_budget=4096)


class History:
    """`rows` requests that accept alike within a task; a new one follows each that ends."""

    def __init__(self, rows: int, seed: int = 0, limits: EngineLimits = LIMITS) -> None:
        rng = np.random.default_rng((seed, 2**31))
        self.limits, self.seed, self.step_id = limits, seed, 0
        self._next_id = rows + 1
        self._id = np.arange(1, rows + 1, dtype=np.uint64)
        self._task = rng.integers(0, TASKS, rows).astype(np.uint32)
        self._prompt = rng.integers(16, 512, rows).astype(np.int32)
        self._output = rng.integers(1, OUTPUT_TOKENS, rows).astype(np.int32)
        self._prefill = np.zeros(rows, np.int32)
        self._lag = rng.integers(0, OUTPUT_TOKENS // 2, rows).astype(np.int32)
        self._recent = np.ones(rows, np.float32)
        self._view = self._look()

    def view(self) -> BatchView:
        """Return the batch before the next step."""
        return self._view

    def step(self, plan: Plan | None, source: PlanSource = PlanSource.LOCAL) -> StepOutcome:
        """Run the next step under a plan; return what it did."""
        view, rng = self._view, self._rng(1)
        fit = fit_plan(plan, view)
        drafted = np.minimum(fit.k, view.max_k)
        ease = 0.4 + 0.15 * (view.task % TASKS)
        hits = rng.random((len(view), self.limits.k_max)) < ease[:, None]
        run = np.cumprod(hits, axis=1).sum(axis=1)
        accepted = np.minimum(run, drafted)
        left = OUTPUT_TOKENS - self._output
        emitted = np.where(view.prefill_tokens > 0, 1, np.minimum(accepted + 1, left))
        outcome = self._outcome(view, plan, source, fit, drafted, accepted, emitted)
        self._advance(outcome, rng)
        return outcome

    def _rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, self.step_id, purpose))

    def _look(self) -> BatchView:
        rng, rows = self._rng(0), len(self._id)
        left = OUTPUT_TOKENS - self._output
        room = np.where(self._prefill > 0, 0, np.minimum(self.limits.k_max, left - 1))
        return BatchView(
            request_id=self._id.copy(),
            task=self._task.copy(),
            context_tokens=self._prompt + self._output,
            output_tokens=self._output.copy(),
            prefill_tokens=self._prefill.copy(),
            temperature=np.where(self._id % 3 == 0, 0.8, 0.0).astype(np.float32),
            max_k=np.maximum(room, 0).astype(np.int32),
            proposer_mask=np.full(rows, self.limits.proposer_mask, np.uint8),
            tpot_target_ms=np.full(rows, np.nan, np.float32),
            recent_accept=self._recent.copy(),
            match_tokens=rng.integers(0, 12, rows).astype(np.int32) * (rng.random(rows) < 0.5),
            draft_kv_lag=self._lag.copy(),
            seeded=self._id % 5 == 0,
            step_id=self.step_id,
            running=rows,
            free_blocks=4 * rows,
            total_blocks=64 * rows,
            kv_tokens=int((self._prompt + self._output).sum()),
            bucket_edges=np.asarray(self.limits.bucket_edges, np.int32),
        )

    def _outcome(
        self,
        view: BatchView,
        plan: Plan | None,
        source: PlanSource,
        fit: Fitted,
        drafted: Array,
        accepted: Array,
        emitted: Array,
    ) -> StepOutcome:
        rows, tokens = len(view), len(view) + int(drafted.sum() + view.prefill_tokens.sum())
        by_model = fit.proposer == Proposer.DRAFT_MODEL
        confidences = np.full((rows, self.limits.k_max), np.nan, np.float32)
        places = np.arange(self.limits.k_max) < drafted[:, None]
        confidences[places & by_model[:, None]] = 0.7
        depth = int(drafted[by_model].max(initial=0))
        draft_ms = np.zeros(PROPOSERS, np.float32)
        draft_ms[Proposer.DRAFT_MODEL] = 0.5 * depth
        step_ms = 5.0 + 0.02 * tokens + 0.5 * depth
        ended = emitted >= OUTPUT_TOKENS - self._output
        return StepOutcome(
            request_id=view.request_id,
            task=view.task,
            proposer=np.where(drafted > 0, fit.proposer, 0).astype(np.uint8),
            requested_k=fit.k.astype(np.int16),
            drafted_k=drafted.astype(np.int16),
            verified_k=drafted.astype(np.int16),
            accepted=accepted.astype(np.int16),
            emitted=emitted.astype(np.int16),
            match_tokens=view.match_tokens,
            truncated_by=np.where(ended, Truncated.LENGTH, Truncated.NONE).astype(np.uint8),
            plan_source=np.where(fit.follows, source, PlanSource.DEFAULT).astype(np.uint8),
            plan_step_id=np.full(rows, plan.step_id if plan else 0, np.uint64),
            confidences=confidences,
            shadow=_shadows(view, drafted),
            step_id=view.step_id,
            padded_tokens=tokens,
            prefill_tokens=int(view.prefill_tokens.sum()),
            kv_tokens=view.kv_tokens,
            draft_ms=draft_ms,
            draft_depth=depth,
            verify_ms=step_ms - 1.0,
            step_ms=step_ms,
        )

    def _advance(self, outcome: StepOutcome, rng: np.random.Generator) -> None:
        emitted = outcome.emitted.astype(np.int32)
        self._output = self._output + emitted
        self._recent = (0.9 * self._recent + 0.1 * emitted).astype(np.float32)
        by_model = outcome.proposer == Proposer.DRAFT_MODEL
        self._lag = np.where(by_model, 0, self._lag + emitted).astype(np.int32)
        self._prefill[:] = 0
        for row in np.flatnonzero(self._output >= OUTPUT_TOKENS):
            self._id[row], self._next_id = self._next_id, self._next_id + 1
            self._task[row] = rng.integers(0, TASKS)
            self._prompt[row] = self._prefill[row] = self._lag[row] = rng.integers(16, 512)
            self._output[row], self._recent[row] = 0, 1.0
        self.step_id += 1
        self._view = self._look()


def _shadows(view: BatchView, drafted: Array) -> ShadowRows:
    """Return an n-gram's guess scored on each row that matched and did not draft."""
    rows = np.flatnonzero((drafted == 0) & (view.match_tokens > 0))
    count = len(rows)
    return ShadowRows(
        request_id=view.request_id[rows],
        proposer=np.full(count, Proposer.NGRAM, np.uint8),
        offered_k=np.full(count, 4, np.int16),
        matched=(view.request_id[rows] % 2).astype(np.float32),
        observed=np.full(count, 2, np.int16),
        match_tokens=view.match_tokens[rows],
        kind=np.full(count, ShadowKind.MATCH, np.uint8),
    )
