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

from parlay.engine.plugins.adapter import Adapter, Decision
from parlay.engine.plugins.step_clock import StepClock
from parlay.engine.plugins.tracked import Standing
from parlay.engine.plugins.vllm_ability import Ability
from parlay.engine.plugins.vllm_report import Reports
from parlay.engine.plugins.vllm_rows import Group, Rows
from parlay.engine.plugins.vllm_step import (
    Drafting,
    Seen,
    Step,
    by_order,
    drafting_of,
    load_of,
)
from parlay.engine.plugins.vllm_uniform import uniform
from parlay.policies.allocate import fit_plan
from parlay.policies.types import NGRAM

_TIMES_KEPT = 4096


class Steering:
    """Steers one scheduler. Of its last steps, `step_us`: what that took, without the policy's own
    part, which `policy_us` has.
    """  # noqa: D205

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
        self.reports = Reports(scheduler, ability, self.rows, self.times)
        self.step_us: deque[float] = deque(maxlen=_TIMES_KEPT)
        self.policy_us: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._steps: deque[Step] = deque()
        self._next: Drafting | None = None
        self._end_s: float | None = None
        self._spent_s, self._policy_us = 0.0, 0.0

    def schedule(self, out: Any) -> None:
        """Take a step that has been put together, before vLLM counts it as computed."""
        start_s = self.clock()
        self.rows.forget(out.finished_req_ids)
        if not out.num_scheduled_tokens:
            return
        last, self._next = self._next, None
        if last is not None and last.group.place.keys().isdisjoint(out.num_scheduled_tokens):
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
        for place, k in enumerate(drafting.k):
            source = drafting.group.sources[place]
            held = source.spec_token_ids
            if held:
                source.spec_token_ids = held[:k]
                drafting.drafted[place] = min(len(held), k)
        self._spent_s += self.clock() - start_s

    def drafts(self, drafts: Any) -> Any:
        """Return the drafts that vLLM is to verify next, of those its proposer has made."""
        start_s = self.clock()
        names, made = list(drafts.req_ids), drafts.draft_token_ids
        if not self.ability.decides_early:
            self._next = self._decide_late(names)
        elif self._next is not None:
            self._fit_again(self._next)
        drafting = self._next
        if drafting is None:
            return drafts
        kept = self._kept(drafting, names, made)
        drafts.draft_token_ids = kept
        self._spent_s += self.clock() - start_s
        return drafts

    def verdict(self, out: Any, output: Any) -> Seen | None:
        """Read what of a step's drafts held, before vLLM takes it into account."""
        start_s = self.clock()
        step = self._step_of(out)
        if step is None or step.verifies is None:
            return None if step is None else Seen(step)
        group, before = step.verifies.group, step.verifies.context
        rows, place = len(group), group.place
        if self.ability.decides_early or not group.stays:
            before = [source.num_tokens for source in group.sources]
        seen = Seen(step, [0] * rows, [0] * rows, before)
        invalid = getattr(out, "num_invalid_spec_tokens", None) or {}
        drawn, index = output.sampled_token_ids, output.req_id_to_index
        for name, tokens in out.scheduled_spec_decode_tokens.items():
            at, of = place.get(name), index.get(name)
            if at is not None and of is not None and drawn and drawn[of]:
                verified = len(tokens) - invalid.get(name, 0)
                seen.verified[at] = verified
                seen.accepted[at] = min(len(drawn[of]) - 1, verified)
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
            self.reports.add(seen, step.verifies, step_ms)
        if not self.scheduler.running:
            self.reports.settle()
        self._spent_s += self.clock() - start_s
        policy_us = self.adapter.counters.policy_us
        self.policy_us.append(policy_us - self._policy_us)
        self.step_us.append(1e6 * self._spent_s - self.policy_us[-1])
        self._spent_s, self._policy_us = 0.0, policy_us

    def close(self) -> None:
        """Let go of a sidecar."""
        self.reports.settle()
        self.adapter.close()

    def _plan_ahead(self, out: Any, step: Step) -> None:
        """Decide what the drafter makes in this step for the next."""
        requests, names = self.scheduler.requests, list(out.num_scheduled_tokens)
        group = self.rows.group(names, [requests[name] for name in names])
        unread = [0] * len(names)
        scheduled = out.num_scheduled_tokens.values()
        for place, (source, tokens) in enumerate(zip(group.sources, scheduled, strict=True)):
            computed = source.num_computed_tokens + tokens
            left = source.num_tokens + source.num_output_placeholders - computed
            if left <= 0:
                row = group.rows[place]
                row.in_flight += 1
                step.started.append(row)
            else:
                unread[place] = left
        context = [source.num_tokens for source in group.sources]
        drafting = self._decide(group, context, unread, self.rows.matches(group))
        pairs = zip(drafting.proposer, drafting.k, strict=True)
        drafting.depth = max((k for by, k in pairs if by == self.ability.column), default=0)
        out.num_spec_tokens_to_schedule = drafting.depth
        self._next = step.makes = drafting

    def _decide_late(self, names: list[str]) -> Drafting | None:
        """Decide for the requests that vLLM would draft for, all of which it has just updated."""
        sources = list(map(self.scheduler.requests.get, names))
        if None in sources:  # vLLM drafts for requests that have just ended
            names = [n for n, s in zip(names, sources, strict=True) if s is not None]
            sources = [s for s in sources if s is not None]
        if not sources:
            return None
        group, unread = self.rows.group(names, sources), None
        if True in [s.is_prefill_chunk for s in sources]:
            unread = [
                s.num_tokens - s.num_computed_tokens if s.is_prefill_chunk else 0 for s in sources
            ]
        context = [s.num_tokens for s in sources]
        match, lookup_ms = self._look_up(group, context, unread is not None)
        takes_view = unread or self.ability.uniform or not group.stays
        order = None if takes_view else self.adapter.again()
        if order is None:
            drafting = self._decide(group, context, unread, match)
        else:
            drafting = by_order(group, *order, context, match)
        drafting.lookup_ms = lookup_ms
        return drafting

    def _decide(
        self, group: Group, context: list[int], unread: list[int] | None, match: list[int]
    ) -> Drafting:
        """Ask for a decision; unread: prompt tokens left to read, None for none anywhere."""
        self.reports.settle()
        tokens = np.array(context, np.int32)
        if self.ability.decides_early:
            tokens += np.array([row.in_flight for row in group.rows], np.int32)
        output, none = tokens - group.prompt_tokens, group.columns.no_lag
        # k drafts emit up to k + 1 tokens.
        left = np.minimum(group.max_tokens - output, self.scheduler.max_model_len - tokens) - 1
        room, prefill = np.maximum(left, 0), none
        if unread is not None:
            prompt = np.array(unread, np.int32)
            prefill = np.minimum(prompt, self.scheduler.max_num_scheduled_tokens)
            room[prompt > 0] = 0
        standing = Standing(tokens, output, prefill, room, np.array(match, np.int32))
        view = group.columns.view(standing, load_of(self.scheduler, sum(context)))
        decision = self._as_graphs_want(self.adapter.decide(view))
        return drafting_of(decision, group, context)

    def _as_graphs_want(self, decision: Decision) -> Decision:
        if self.ability.uniform:
            uniform(decision.fit, decision.view, self.ability.column, self.ability.lengths)
        return decision

    def _look_up(self, group: Group, context: list[int], prompts: bool) -> tuple[list[int], float]:
        """Return how long a match each text ends with now, and what finding it took in ms."""
        if not self.ability.own_ngram:
            return self.rows.matches(group), 0.0
        start_s = self.clock()
        match = self.rows.read(group, context, prompts)
        return match, 1e3 * (self.clock() - start_s)

    def _fit_again(self, drafting: Drafting) -> None:
        """Fit a decision made before the drafter ran to what our n-gram finds after it."""
        group = drafting.group
        context = [source.num_tokens for source in group.sources]
        prompts = True in [source.is_prefill_chunk for source in group.sources]
        match, drafting.lookup_ms = self._look_up(group, context, prompts)
        old = drafting.decision()
        if match != old.view.match_tokens.tolist():
            view = dataclasses.replace(old.view, match_tokens=np.array(match, np.int32))
            new = Decision(view, old.plan, old.source, fit_plan(old.plan, view))
            drafting.take(self._as_graphs_want(new))

    def _kept(self, drafting: Drafting, names: list[str], made: list[list[int]]) -> list[list[int]]:
        """Return each request's drafts: its proposer's first k tokens."""
        group, early = drafting.group, self.ability.decides_early
        ks, by, ours = drafting.k, drafting.proposer, self.ability.own_ngram
        if ours and not self.rows.full:
            pairs = zip(group.rows, by, strict=True)
            self.rows.offer(row for row, proposer in pairs if proposer != NGRAM)
        kept: list[list[int]] = [[] for _ in names]
        if not any(ks):
            return kept
        for at, name in enumerate(names):
            place = group.place.get(name)
            if place is None or not (k := ks[place]):
                continue
            if early:
                # Decided without knowing how many tokens this step would give.
                source = group.sources[place]
                k = min(k, max(source.max_tokens - source.num_output_tokens - 1, 0))
            tokens = made[at]
            if ours and by[place] == NGRAM:
                index = group.rows[place].index
                tokens = [] if index is None else index.propose(k)
            kept[at] = tokens[:k]
            drafting.drafted[place] = len(kept[at])
        return kept

    def _step_of(self, out: Any) -> Step | None:
        """Return the step of this output, and drop those that vLLM has dropped."""
        while self._steps:
            step = self._steps.popleft()
            if step.out is out:
                return step
        return None
