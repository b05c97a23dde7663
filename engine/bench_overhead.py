"""What a step costs beside the models: scheduling, planning, committing, reporting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.policy import make_policy

BATCHES = (4, 32)
PROMPT_TOKENS = 96
"""Of each prompt, so that 32 of them are read soon."""
_MOST_STEPS = 8
"""For each step that counts; the rest still read prompts."""


def overhead_ms(
    backend: TorchBackend,
    prompt_ids: Sequence[list[int]],
    policies: Mapping[str, str],
    steps: int,
) -> dict[str, dict[str, float]]:
    """Return by mode and batch the median of step_ms - verify_ms - draft_ms, over `steps` steps.

    policies: by mode. Only steps in which the whole batch decodes count. verify_ms holds the
    target's pass and sampling, draft_ms each proposer's work.
    """
    return {
        mode: {str(b): _median_ms(backend, prompt_ids, policy, b, steps) for b in BATCHES}
        for mode, policy in policies.items()
    }


def _median_ms(
    backend: TorchBackend, prompt_ids: Sequence[list[int]], policy: str, batch: int, steps: int
) -> float:
    config = replace(backend.config, max_running=batch, prefix_cache=False)
    engine = Engine(
        backend, LocalPlanner(make_policy(policy, {}, backend.limits())), config, eos_ids=()
    )
    room = config.positions - PROMPT_TOKENS
    sampling = SamplingParams(max_tokens=min(room, steps * (backend.limits().k_max + 1) + 1))
    requests = [
        engine.add(prompt_ids[i % len(prompt_ids)][:PROMPT_TOKENS], sampling) for i in range(batch)
    ]
    found: list[float] = []
    for _ in range(_MOST_STEPS * steps):
        outcome = engine.step()
        if outcome is None or len(found) == steps:
            break
        if len(outcome.request_id) == batch and not outcome.prefill_tokens:
            found.append(outcome.step_ms - outcome.verify_ms - float(outcome.draft_ms.sum()))
    for request in requests:
        engine.abort(request)
    return median(found)
