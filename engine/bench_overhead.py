"""What a step costs beside the models: the engine's own work, and deciding in its thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.request import SamplingParams
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome

BATCHES = (4, 32)
PROMPT_TOKENS = 96
"""Of each prompt, so that 32 of them are read soon."""
_MOST_STEPS = 8
"""For each step that counts; the rest still read prompts."""


class TimedPlanner:
    """A planner in this process that counts its time.

    spent_ms: on the last plan and on learning from the outcome before it, as a step's clock has it.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner, self.spent_ms, self._learning_ms = planner, 0.0, 0.0

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Decide."""
        start_s = time.perf_counter()
        found = self.planner.plan(view)
        self.spent_ms = self._learning_ms + 1e3 * (time.perf_counter() - start_s)
        return found

    def observe(self, outcome: StepOutcome) -> None:
        """Learn."""
        start_s = time.perf_counter()
        self.planner.observe(outcome)
        self._learning_ms = 1e3 * (time.perf_counter() - start_s)

    def close(self) -> None:
        """Let go of what the planner holds."""
        self.planner.close()


def overhead_ms(
    backend: TorchBackend,
    prompt_ids: Sequence[list[int]],
    policies: Mapping[str, str],
    steps: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by mode and batch the medians over `steps` steps of two parts of a step.

    policies: by mode, asked in every step. "engine": step_ms - verify_ms - draft_ms without
    "policy": deciding and learning, which a sidecar takes over. verify_ms holds the target's pass
    and sampling, draft_ms each proposer's work. Only steps in which the whole batch decodes count.
    """
    return {
        mode: {str(b): _medians_ms(backend, prompt_ids, policy, b, steps) for b in BATCHES}
        for mode, policy in policies.items()
    }


def _medians_ms(
    backend: TorchBackend, prompt_ids: Sequence[list[int]], policy: str, batch: int, steps: int
) -> dict[str, float]:
    config = replace(backend.config, max_running=batch, prefix_cache=False)
    planner = TimedPlanner(LocalPlanner(make_policy(policy, {}, backend.limits())))
    engine = Engine(backend, planner, config, eos_ids=())
    room = config.positions - PROMPT_TOKENS
    sampling = SamplingParams(max_tokens=min(room, steps * (backend.limits().k_max + 1) + 1))
    requests = [
        engine.add(prompt_ids[i % len(prompt_ids)][:PROMPT_TOKENS], sampling) for i in range(batch)
    ]
    found: list[tuple[float, float]] = []
    for _ in range(_MOST_STEPS * steps):
        outcome = engine.step()
        if outcome is None or len(found) == steps:
            break
        if len(outcome.request_id) == batch and not outcome.prefill_tokens:
            rest_ms = outcome.step_ms - outcome.verify_ms - float(outcome.draft_ms.sum())
            found.append((rest_ms - planner.spent_ms, planner.spent_ms))
    for request in requests:
        engine.abort(request)
    own_ms, policy_ms = zip(*found, strict=True)
    return {"engine": median(own_ms), "policy": median(policy_ms)}
