"""vLLM's scheduler, steered: a subclass of whichever one vLLM would have used."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from parlay.engine.plugins.adapter import Adapter
from parlay.engine.plugins.hooks import extended, ours, reason
from parlay.engine.plugins.settings import read_settings, sparing_planner
from parlay.engine.plugins.vllm_ability import Ability, ability_of
from parlay.engine.plugins.vllm_steering import Steering

# A child of vLLM's own logger is shown wherever vLLM's lines are.
log = logging.getLogger("vllm.parlay")
_STOPS = "parlay stops steering this engine, which drafts as it is configured"
_ours = functools.partial(ours, log, _STOPS)


@functools.cache
def steered(base: type) -> type:
    """Return a subclass of one of vLLM's scheduler classes that is steered."""
    hooks = {
        "_update_after_schedule": _update_after_schedule,
        "update_draft_token_ids": _update_draft_token_ids,
        "update_from_output": _update_from_output,
        "shutdown": _shutdown,
    }
    return extended(base, begin, hooks)


def begin(scheduler: Any) -> Steering | None:
    """Return what steers a scheduler; None, with a line in the log, where nothing can."""
    try:
        output = importlib.import_module("vllm.v1.core.sched.output").SchedulerOutput
        ability = ability_of(scheduler, output)
        limits = ability.limits(scheduler.max_num_scheduled_tokens)
        settings = read_settings()
        planner = sparing_planner(settings, "vllm", limits)
        steering = Steering(scheduler, ability, Adapter("vllm", limits, planner=planner))
    except Exception as error:
        log.warning("parlay does not steer this engine: %s", reason(error))
        return None
    by = f"the sidecar at {settings.sidecar}" if settings.sidecar else settings.policy
    log.info("parlay steers this engine: %s, decided by %s", words_of(ability), by)
    return steering


def words_of(ability: Ability) -> str:
    """Return in a few words what is steered."""
    arms = "our n-gram" if ability.replaces else ability.method
    if ability.own_ngram and not ability.replaces:
        arms += " or our n-gram"
    rows = "one k for the batch" if ability.uniform else "a k for each request"
    way = "asynchronous" if ability.asynchronous else "synchronous"
    return f"{arms}, up to {ability.k_max} tokens, {rows}, {way} scheduling"


def _update_after_schedule(base: Any) -> Callable[..., None]:
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        _ours(self, lambda s: s.schedule(scheduler_output))
        base._update_after_schedule(self, scheduler_output)
        _ours(self, lambda s: s.cut_placeholders())

    return _update_after_schedule


def _update_draft_token_ids(base: Any) -> Callable[..., None]:
    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        kept = _ours(self, lambda s: s.drafts(draft_token_ids), lambda: draft_token_ids)
        base.update_draft_token_ids(self, kept)

    return update_draft_token_ids


def _update_from_output(base: Any) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        seen = _ours(self, lambda s: s.verdict(scheduler_output, model_runner_output))
        outputs = base.update_from_output(self, scheduler_output, model_runner_output)
        if seen is not None:
            _ours(self, lambda s: s.commit(seen))
        return outputs

    return update_from_output


def _shutdown(base: Any) -> Callable[..., None]:
    def shutdown(self: Any) -> None:
        steering, self.parlay = self.parlay, None
        if steering is not None:
            steering.close()
            log.info("parlay: %s", steering.adapter.counters.as_dict())
        base.shutdown(self)

    return shutdown
