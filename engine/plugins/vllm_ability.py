"""What a vLLM, as it is installed and configured, lets us steer; or why it lets us steer nothing.

Free of vLLM itself: it reads the scheduler that vLLM has made.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parlay.engine.plugins import hooks
from parlay.policies.policy import EngineLimits
from parlay.policies.types import DRAFT_MODEL, K_LIMIT, MEDUSA, NGRAM, NONE

HOOKS = ("_update_after_schedule", "update_draft_token_ids", "update_from_output")
"""Methods of vLLM's scheduler that we extend; in 0.20 to 0.33 they are all there."""
VERSIONS = "0.26 to 0.33"
_DEPTH = "num_spec_tokens_to_schedule"
_COLUMNS = {"ngram": NGRAM, "ngram_gpu": NGRAM, "suffix": NGRAM, "medusa": MEDUSA}
_ONE_PASS = ("medusa", "suffix", "custom_class", "dflash", "dspark", "mlp_speculator")
_NOT_DRAFTING = ("extract_hidden_states",)
_ROWS = ("uniform", "ragged")


@dataclass(slots=True, frozen=True)
class Ability:
    """method: vLLM's name of its proposer; column: the proposer that it is in a Plan; k_max: tokens
    it is configured for. asynchronous: a step is scheduled before the tokens of the last are known.
    steers_depth: a token less asked of the proposer is a pass less. own_ngram: our n-gram may draft
    too, and does in the stead of vLLM's. uniform: all rows draft one k, of `lengths` if there are
    any. bonus_passes: passes that drafting always takes.
    """  # noqa: D205

    method: str
    column: int
    k_max: int
    asynchronous: bool = False
    steers_depth: bool = False
    own_ngram: bool = False
    uniform: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def decides_early(self) -> bool:
        """Say whether a decision is made before drafting; else after, in full knowledge."""
        return self.asynchronous or self.steers_depth

    @property
    def replaces(self) -> bool:
        """Say whether vLLM's own proposer never drafts."""
        return self.own_ngram and self.column == NGRAM

    def passes(self, depth: int) -> int:
        """Return the passes that drafting `depth` tokens takes beyond those of drafting none.

        vLLM's drafter reads along even where it is asked for nothing, and gets a token from that.
        """
        return max(depth - 1, 0) if self.steers_depth else 0

    def limits(self, token_budget: int) -> EngineLimits:
        """Return what a policy is told; token_budget: tokens that fit in a step."""
        mask = 1 << NONE | 1 << self.column | self.own_ngram << NGRAM
        return EngineLimits(mask, self.k_max, token_budget=token_budget)


def ability_of(scheduler: Any, output: Any, environ: Mapping[str, str] = os.environ) -> Ability:
    """Return what can be steered of a scheduler; output: the class of what it hands to workers.

    Raises ValueError, with the reason in words for the log, where that is nothing.
    """
    lacks = lacking(scheduler, output)
    if lacks is not None:
        raise ValueError(f"this vLLM's scheduler has no {lacks}; {VERSIONS} have it")
    config = scheduler.vllm_config
    spec, parallel = config.speculative_config, config.parallel_config
    if spec is None or not spec.num_speculative_tokens:
        raise ValueError("vLLM was started without --speculative-config: there is nothing to steer")
    if spec.method in _NOT_DRAFTING or getattr(scheduler, "num_sampled_tokens_per_step", 1) != 1:
        raise ValueError(f"the method {spec.method} drafts nothing that could be steered")
    if parallel.data_parallel_size > 1:
        raise ValueError("data parallel ranks that draft different lengths wait for each other")
    if parallel.pipeline_parallel_size > 1:
        raise ValueError("pipeline parallel schedules are not steered")
    return ability_for(scheduler, environ)


def lacking(scheduler: Any, output: Any) -> str | None:
    """Return what a vLLM lacks that we need, None for nothing; a scheduler or its class."""
    fields = {f.name for f in dataclasses.fields(output)}
    return hooks.lacking(scheduler, HOOKS) or (None if _DEPTH in fields else _DEPTH)


def ability_for(scheduler: Any, environ: Mapping[str, str]) -> Ability:
    """Return what can be steered of a scheduler that speculates and has what we need."""
    spec = scheduler.vllm_config.speculative_config
    asynchronous = bool(scheduler.scheduler_config.async_scheduling)
    second = bool(getattr(scheduler, "use_v2_model_runner", False))
    column = _COLUMNS.get(spec.method, DRAFT_MODEL)
    # The second runner keeps the drafts to itself. Where it is told what the draft's law was,
    # nobody else's tokens may take the draft's place.
    values = not asynchronous and not second
    values &= getattr(spec, "draft_sample_method", "greedy") == "greedy"
    by_passes = column == DRAFT_MODEL and spec.method not in _ONE_PASS
    listed = getattr(spec, "num_speculative_tokens_per_batch_size", None) or ()
    return Ability(
        method=spec.method,
        column=column,
        k_max=min(int(spec.num_speculative_tokens), K_LIMIT),
        asynchronous=asynchronous,
        steers_depth=by_passes and not (second and spec.method == "draft_model"),
        own_ngram=values and spec.method != "suffix",
        uniform=_uniform(scheduler.vllm_config, environ),
        lengths=tuple(sorted({int(entry[2]) for entry in listed})),
    )


def _uniform(config: Any, environ: Mapping[str, str]) -> bool:
    """Say whether all rows draft one k: as PARLAY_VLLM_ROWS says, else where graphs want it."""
    asked = environ.get("PARLAY_VLLM_ROWS", "")
    if asked and asked not in _ROWS:
        raise ValueError(f"PARLAY_VLLM_ROWS must be {' or '.join(_ROWS)}, not {asked!r}")
    if asked:
        return asked == "uniform"
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    decode = getattr(mode, "decode_mode", None)
    eager = bool(getattr(config.model_config, "enforce_eager", False))
    return not eager and decode is not None and decode().name == "FULL"
