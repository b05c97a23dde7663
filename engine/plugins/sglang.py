"""SGLang: its adaptive speculation, with our policies in the place of its own rule.

PARLAY=1 in the environment of a server that runs with `--speculative-adaptive`. Free of SGLang
until that calls `register`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parlay.engine.plugins.adapter import Adapter
from parlay.engine.plugins.hooks import extended, lacking, ours, reason
from parlay.engine.plugins.settings import read_settings
from parlay.engine.plugins.sglang_steps import BatchSteps, StepPrice
from parlay.policies.policy import EngineLimits
from parlay.policies.types import DRAFT_MODEL, K_LIMIT, NONE

TARGET = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
HOOKS = (
    "set_cuda_graph_bs",
    "get_steps_for_batch",
    "on_verify_complete",
    "cuda_graph_bs_for_step",
)
"""Methods of SGLang's that we extend or ask; 0.5.23 has them."""
_TOKENS = 1 << 16

# A child of SGLang's own logger is shown wherever SGLang's lines are.
log = logging.getLogger("sglang.parlay")
_ours = functools.partial(ours, log, "parlay stops steering, SGLang's own rule goes on")


def register() -> None:
    """Have every adaptive server of this process ask us; SGLang calls this at start.

    The entry point `parlay` of the group `sglang.srt.plugins`. Does nothing unless PARLAY=1.
    """
    if os.environ.get("PARLAY") != "1":
        return
    module, _, name = TARGET.rpartition(".")
    base = getattr(importlib.import_module(module), name)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(TARGET, steered(base), hooks.HookType.REPLACE)


@functools.cache
def steered(base: type) -> type:
    """Return a subclass of SGLang's own policy that asks ours, and is its own where ours fails."""
    hooks = {
        "set_cuda_graph_bs": _set_cuda_graph_bs,
        "get_steps_for_batch": _get_steps_for_batch,
        "on_verify_complete": _on_verify_complete,
    }
    return extended(base, begin, hooks, _graphs=None)


def begin(params: Any, environ: Mapping[str, str] = os.environ) -> BatchSteps | None:
    """Return what decides for a server; None, with a line in the log, where nothing can."""
    try:
        if (lacks := lacking(params, HOOKS)) is not None:
            raise ValueError(f"this SGLang's adaptive policy has no {lacks}")
        steps = _decider(params, environ)
    except Exception as error:
        log.warning("parlay leaves adaptive speculation to SGLang: %s", reason(error))
        return None
    lengths = ", ".join(map(str, params.candidate_steps))
    believed = "measured" if steps.clock is not None else "as PARLAY_SGLANG_STEP has it"
    log.info("parlay steers adaptive speculation: %s steps, step times %s", lengths, believed)
    return steps


def _decider(params: Any, environ: Mapping[str, str]) -> BatchSteps:
    settings = read_settings(environ=environ)
    alone = ranks() == 1
    if not alone and settings.sidecar is not None:
        raise ValueError("ranks may hear from a sidecar at different steps; unset PARLAY_SIDECAR")
    most = min(max(params.candidate_steps), K_LIMIT)
    limits = EngineLimits(1 << NONE | 1 << DRAFT_MODEL, most, token_budget=_TOKENS)
    price = read_price(environ.get("PARLAY_SGLANG_STEP", ""))
    clock = time.perf_counter if alone else None
    return BatchSteps(Adapter("sglang", limits, settings), clock, price)


def ranks() -> int:
    """Return how many processes must decide alike."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def read_price(text: str) -> StepPrice:
    """Return what PARLAY_SGLANG_STEP says a step takes: `step,token,pass`, in any unit.

    Raises ValueError where it is not three numbers.
    """
    if not text:
        return StepPrice()
    try:
        fixed, token, draft_pass = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"PARLAY_SGLANG_STEP: write what a step, a verified token and a pass of the drafter"
            f" take, as 10,0.03,0.6, not {text!r}"
        ) from None
    return StepPrice(fixed, token, draft_pass)


def lengths_for(params: Any, batch_size: int, graphs: Sequence[int] | None) -> list[int]:
    """Return the steps that a batch may run with: those that SGLang captured its graph for.

    graphs: sizes of graphs, rising; None where there are none, and every step can run.
    """
    every = sorted(params.candidate_steps)
    if not graphs:
        return every
    size = graphs[min(bisect_left(graphs, batch_size), len(graphs) - 1)]
    captured = [(step, params.cuda_graph_bs_for_step(step)) for step in every]
    return [step for step, sizes in captured if sizes is None or size in sizes] or every


def _set_cuda_graph_bs(base: Any) -> Callable[..., None]:
    def set_cuda_graph_bs(self: Any, cuda_graph_bs: list[int] | None) -> None:
        base.set_cuda_graph_bs(self, cuda_graph_bs)
        self._graphs = sorted(cuda_graph_bs) if cuda_graph_bs else None

    return set_cuda_graph_bs


def _get_steps_for_batch(base: Any) -> Callable[..., int]:
    def get_steps_for_batch(self: Any, batch_size: int) -> int:
        def decide(steps: BatchSteps) -> int:
            return steps.steps(batch_size, lengths_for(self, batch_size, self._graphs))

        own = functools.partial(base.get_steps_for_batch, self, batch_size)
        return int(_ours(self, decide, own))

    return get_steps_for_batch


def _on_verify_complete(base: Any) -> Callable[..., int | None]:
    def on_verify_complete(
        self: Any, accepted: list[int], batch_size: int, num_steps: int | None = None, **more: Any
    ) -> int | None:
        def hear(steps: BatchSteps) -> None:
            # No step is named here: the next one is asked for when its batch is known, and under
            # overlap another runs already.
            steps.verified(accepted, batch_size, num_steps)

        told = {**more, "num_steps": num_steps} if num_steps is not None else more
        own = functools.partial(base.on_verify_complete, self, accepted, batch_size, **told)
        found: int | None = _ours(self, hear, own)
        return found

    return on_verify_complete
