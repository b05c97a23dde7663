"""What is told of vLLM's steps: where some go by one decision, together with the next."""

from __future__ import annotations

import functools
import operator
from typing import Any

from parlay.engine.plugins.adapter import Decision, StepResult
from parlay.engine.plugins.step_clock import StepClock
from parlay.engine.plugins.vllm_ability import Ability
from parlay.engine.plugins.vllm_rows import Rows
from parlay.engine.plugins.vllm_step import Drafting, Seen, ended, endings, prompt_tokens


class Reports:
    """Tells the adapter of `rows` what came of their drafts; times: learns what drafting takes."""

    def __init__(self, scheduler: Any, ability: Ability, rows: Rows, times: StepClock) -> None:
        self.scheduler, self.ability, self.rows, self.times = scheduler, ability, rows, times

    def add(self, seen: Seen, drafting: Drafting, step_ms: float) -> None:
        """Take a step that vLLM has taken into account."""
        seen.after = [source.num_tokens for source in drafting.group.sources]
        seen.ended = ended(self.scheduler, drafting.group)
        told = functools.partial(self._told, seen, drafting, step_ms)
        if not self.ability.decides_early:
            self.rows.adapter.observe_later(told)
            return
        # What the drafter took belongs to the drafts that the next step verifies.
        self.rows.score()
        self.rows.adapter.observe(*told())

    def settle(self) -> None:
        """Tell of every step that was taken; call it before a view is made."""
        self.rows.score()
        self.rows.adapter.settle()

    def _told(self, seen: Seen, drafting: Drafting, step_ms: float) -> tuple[Decision, StepResult]:
        step, decision = seen.step, drafting.decision()
        out, makes = step.out, step.makes
        total, prompts = out.total_num_scheduled_tokens, prompt_tokens(out)
        verify_ms, draft_ms = step_ms - drafting.lookup_ms, 0.0
        if self.ability.steers_depth and makes is not None:
            passes, rows = self.ability.passes(makes.depth), len(makes.group)
            kv_tokens = decision.view.kv_tokens
            verify_ms, draft_ms = self.times.split(
                verify_ms, total, kv_tokens, prompts, passes, rows
            )
        if makes is not None:
            makes.draft_ms = draft_ms
        result = StepResult(
            drafted=list(map(max, drafting.drafted, seen.verified)),
            verified=seen.verified,
            accepted=seen.accepted,
            emitted=list(map(operator.sub, seen.after, seen.before)),
            truncated_by=endings(drafting.group, seen.ended),
            draft_ms=drafting.spent_ms(self.ability.column),
            draft_depth=drafting.depth,
            verify_ms=verify_ms,
            step_ms=step_ms - draft_ms + drafting.draft_ms,
            padded_tokens=total,
            prefill_tokens=prompts,
        )
        if self.ability.own_ngram:
            result.shadow = self.rows.scored()
        return decision, result
