"""What happens at the three places where vLLM's scheduler lets us in.

A decision is made once a step: before the drafter runs where that saves it passes (or where the
next step is scheduled before this one's tokens are known), else after it, on what has just been
committed. Its drafts are verified in the step that follows, and reported when that one ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from parlay.engine.backend import Lookup
from parlay.engine.plugins.adapter import Adapter, Decision, Load, StepResult, view_of
from parlay.engine.plugins.vllm_ability import Ability
from parlay.engine.plugins.vllm_clock import StepClock
from parlay.engine.plugins.vllm_rows import Row, Rows
from parlay.engine.plugins.vllm_step import Drafting, Seen, Step, prompt_tokens, truncated
from parlay.engine.plugins.vllm_uniform import uniform
from parlay.policies.allocate import fit_plan
from parlay.policies.types import NGRAM, PROPOSERS, Array

_TIMES_KEPT = 4096


class Steering:
    """Steers one scheduler. `step_us`: what that took of its last steps."""

    def __init__(
        self,
        scheduler: Any,
        ability: Ability,
        adapter: Adapter,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler, self.ability, self.adapter, self.clock = scheduler, ability, adapter, clock
        self.rows = Rows(adapter, ability.own_ngram, scheduler.max_model_len)
        self.times = StepClock()
        self.step_us: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._steps: deque[Step] = deque()
        self._next: Drafting | None = None
        self._end_s: float | None = None
        self._spent_s = 0.0

    def schedule(self, out: Any) -> None:
        """Take a step that has been put together, before vLLM counts it as computed."""
        start_s = self.clock()
        self.rows.forget(out.finished_req_ids)
        if not out.num_scheduled_tokens:
            return
        last, self._next = self._next, None
        if last is not None and last.place.keys().isdisjoint(out.num_scheduled_tokens):
            last = None  # everybody it was for has left
        step = Step(out, start_s, last)
        self._steps.append(step)
        if self.ability.decides_early:
            self._plan_ahead(out, step)
        elif self.ability.replaces:
            out.num_spec_tokens_to_schedule = 0
        self._spent_s += self.clock() - start_s

    def cut_placeholders(self) -> None:
        """Give each request of the step just scheduled as many placeholders as it may draft.

        For asynchronous scheduling, in which the drafts themselves never come here.
        """
        start_s, drafting = self.clock(), self._next
        if not self.ability.asynchronous or drafting is None:
            return
        k = drafting.decision.fit.k.tolist()
        for place, row in enumerate(drafting.rows):
            held = row.source.spec_token_ids
            if held:
                row.source.spec_token_ids = held[: k[place]]
                drafting.drafted[place] = min(len(held), k[place])
        self._spent_s += self.clock() - start_s

    def drafts(self, drafts: Any) -> Any:
        """Return the drafts that vLLM is to verify next, of those its proposer has made."""
        start_s = self.clock()
        names, made = list(drafts.req_ids), drafts.draft_token_ids
        if self.ability.decides_early:
            lookup = None if self._next is None else self._fit_again(self._next)
        else:
            self._next, lookup = self._decide_late(names)
        drafting = self._next
        if drafting is None:
            return drafts
        kept = self._kept(drafting, lookup, names, made)
        self._spent_s += self.clock() - start_s
        return dataclasses.replace(drafts, draft_token_ids=kept)

    def verdict(self, out: Any, output: Any) -> Seen | None:
        """Read what of a step's drafts held, before vLLM takes it into account."""
        start_s = self.clock()
        step = self._step_of(out)
        if step is None or step.verifies is None:
            return None if step is None else Seen(step, _none(0), _none(0), [])
        rows, place = step.verifies.rows, step.verifies.place
        seen = Seen(step, _none(len(rows)), _none(len(rows)), [])
        seen.outputs = [row.source.num_output_tokens for row in rows]
        invalid = getattr(out, "num_invalid_spec_tokens", None) or {}
        drawn, index = output.sampled_token_ids, output.req_id_to_index
        for name, tokens in out.scheduled_spec_decode_tokens.items():
            at, of = place.get(name), index.get(name)
            if at is not None and of is not None and drawn and drawn[of]:
                seen.verified[at] = len(tokens) - invalid.get(name, 0)
                seen.accepted[at] = min(len(drawn[of]) - 1, int(seen.verified[at]))
        self._spent_s += self.clock() - start_s
        return seen

    def commit(self, seen: Seen) -> None:
        """Report a step, after vLLM has taken it into account."""
        start_s = self.clock()
        step = seen.step
        for row in step.started:
            row.in_flight = max(row.in_flight - 1, 0)
        begin_s = step.start_s if self._end_s is None else self._end_s
        step_ms = 1e3 * (start_s - begin_s)
        # Idleness is nobody's step.
        self._end_s = start_s if self.scheduler.running else None
        if step.verifies is not None:
            self._report(step, step.verifies, seen, step_ms)
        self._spent_s += self.clock() - start_s
        self.step_us.append(1e6 * self._spent_s)
        self._spent_s = 0.0

    def close(self) -> None:
        """Let go of a sidecar."""
        self.adapter.close()

    def _plan_ahead(self, out: Any, step: Step) -> None:
        """Decide what the drafter makes in this step for the next."""
        names, rows, unread = [], [], []
        requests = self.scheduler.requests
        for name, tokens in out.num_scheduled_tokens.items():
            source = requests[name]
            row = self.rows.of(name, source)
            computed = source.num_computed_tokens + tokens
            left = source.num_tokens + source.num_output_placeholders - computed
            if left <= 0:
                row.in_flight += 1
                step.started.append(row)
            names.append(name)
            rows.append(row)
            unread.append(max(left, 0))
        drafting = self._decide(names, rows, unread)
        fit = drafting.decision.fit
        drafting.depth = int(fit.k[fit.proposer == self.ability.column].max(initial=0))
        out.num_spec_tokens_to_schedule = drafting.depth
        self._next = step.makes = drafting

    def _decide_late(self, names: list[str]) -> tuple[Drafting | None, Lookup | None]:
        """Decide for the requests that vLLM would draft for, all of which it has just updated."""
        kept, rows, unread = [], [], []
        for name in names:
            source = self.scheduler.requests.get(name)
            if source is not None and not source.is_finished():
                left = source.num_tokens - source.num_computed_tokens
                kept.append(name)
                rows.append(self.rows.of(name, source))
                unread.append(left if source.is_prefill_chunk else 0)
        if not rows:
            return None, None
        lookup, ms = self._look_up(rows)
        drafting = self._decide(kept, rows, unread)
        drafting.lookup_ms = ms
        return drafting, lookup

    def _decide(self, names: list[str], rows: list[Row], unread: list[int]) -> Drafting:
        budget = self.scheduler.max_num_scheduled_tokens
        for row, left in zip(rows, unread, strict=True):
            self.rows.describe(row, min(left, budget))
        tracked = [row.tracked for row in rows]
        view = view_of(tracked, self.adapter.limits, self._load(rows))
        decision = self._as_graphs_want(self.adapter.decide(view))
        return Drafting(decision, rows, {n: i for i, n in enumerate(names)}, _none(len(rows)))

    def _as_graphs_want(self, decision: Decision) -> Decision:
        if self.ability.uniform:
            uniform(decision.fit, decision.view, self.ability.column, self.ability.lengths)
        return decision

    def _load(self, rows: list[Row]) -> Load:
        pool = self.scheduler.kv_cache_manager.block_pool
        return Load(
            waiting=len(self.scheduler.waiting),
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks,
        )

    def _look_up(self, rows: list[Row]) -> tuple[Lookup | None, float]:
        """Return our n-gram's guesses on what is known now, and what they took in ms."""
        if not self.ability.own_ngram:
            return None, 0.0
        start_s = self.clock()
        lookup = self.rows.lookup(rows, self.ability.k_max)
        for row, match in zip(rows, lookup.match_tokens.tolist(), strict=True):
            row.tracked.match_tokens = match
        return lookup, 1e3 * (self.clock() - start_s)

    def _fit_again(self, drafting: Drafting) -> Lookup | None:
        """Fit a decision made before the drafter ran to what our n-gram finds after it."""
        lookup, drafting.lookup_ms = self._look_up(drafting.rows)
        old = drafting.decision
        if lookup is not None and not np.array_equal(lookup.match_tokens, old.view.match_tokens):
            view = dataclasses.replace(old.view, match_tokens=lookup.match_tokens)
            new = Decision(view, old.plan, old.source, fit_plan(old.plan, view))
            drafting.decision = self._as_graphs_want(new)
        return lookup

    def _kept(
        self, drafting: Drafting, lookup: Lookup | None, names: list[str], made: list[list[int]]
    ) -> list[list[int]]:
        """Return each request's drafts: its proposer's first k tokens."""
        fit = drafting.decision.fit
        proposers, ks = fit.proposer.tolist(), fit.k.tolist()
        kept: list[list[int]] = []
        for name, tokens in zip(names, made, strict=True):
            place = drafting.place.get(name)
            k = 0 if place is None else ks[place]
            if not k or place is None:
                kept.append([])
                continue
            if lookup is not None and proposers[place] == NGRAM:
                tokens = [t for t in lookup.tokens[place, :k].tolist() if t >= 0]
            source = drafting.rows[place].source
            # Decided early, without knowing how many tokens this step would give.
            room = max(source.max_tokens - source.num_output_tokens - 1, 0)
            kept.append(list(tokens[: min(k, room)]))
            drafting.drafted[place] = len(kept[-1])
        if lookup is not None:
            self.rows.offer(drafting.rows, lookup, fit.proposer != NGRAM)
        return kept

    def _step_of(self, out: Any) -> Step | None:
        """Return the step of this output, and drop those that vLLM has dropped."""
        while self._steps:
            step = self._steps.popleft()
            if step.out is out:
                return step
        return None

    def _report(self, step: Step, drafting: Drafting, seen: Seen, step_ms: float) -> None:
        out, decision = step.out, drafting.decision
        total, prompts = out.total_num_scheduled_tokens, prompt_tokens(out)
        own_ms, draft_ms = step_ms - drafting.lookup_ms, 0.0
        verify_ms, makes = own_ms, step.makes
        if self.ability.steers_depth and makes is not None:
            passes, rows = self.ability.passes(makes.depth), len(makes.rows)
            kv_tokens = decision.view.kv_tokens
            verify_ms, draft_ms = self.times.split(own_ms, total, kv_tokens, prompts, passes, rows)
        if makes is not None:
            makes.draft_ms = draft_ms
        emitted = [
            row.source.num_output_tokens - before
            for row, before in zip(drafting.rows, seen.outputs, strict=True)
        ]
        result = StepResult(
            drafted=np.maximum(drafting.drafted, seen.verified),
            verified=seen.verified,
            accepted=seen.accepted,
            emitted=np.asarray(emitted, np.int32),
            truncated_by=np.asarray([truncated(row.source) for row in drafting.rows], np.uint8),
            draft_ms=self._draft_ms(drafting),
            draft_depth=drafting.depth,
            verify_ms=verify_ms,
            step_ms=step_ms - draft_ms + drafting.draft_ms,
            padded_tokens=total,
            prefill_tokens=prompts,
        )
        if self.ability.own_ngram:
            result.shadow = self.rows.score()
        self.adapter.observe(decision, result)

    def _draft_ms(self, drafting: Drafting) -> Array:
        """Return what the drafts took, f32 [PROPOSERS]."""
        spent = np.zeros(PROPOSERS, np.float32)
        spent[NGRAM] = drafting.lookup_ms
        spent[self.ability.column] += drafting.draft_ms
        return spent


def _none(rows: int) -> Array:
    return np.zeros(rows, np.int32)
