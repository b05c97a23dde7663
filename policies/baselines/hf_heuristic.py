"""k of each request moves by what its last draft did: +2 when all held, else -1, at least 1.

Source: Hugging Face transformers, `num_assistant_tokens_schedule` "heuristic" and
"heuristic_transient", with `num_assistant_tokens` 5 or 20 to start from. Transient: every request
starts again at k_start; else a new request goes on from the k that was set last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.per_request import PerRequest
from parlay.policies.baselines.rows import check_k, drafter, rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import K_LIMIT, Array, BatchView, Plan, Reason, StepOutcome


@dataclass(slots=True, frozen=True)
class HfHeuristicSettings:
    """proposer; k_start, the first k; transient, start each request there."""

    proposer: str = "draft_model"
    k_start: int = 5
    transient: bool = True

    def __post_init__(self) -> None:
        drafter("hf_heuristic", self.proposer)
        check_k("hf_heuristic", "k_start", self.k_start, least=1)


@register("hf_heuristic", HfHeuristicSettings)
class HfHeuristic(Stateless):
    """Keeps one k a request."""

    name = "hf_heuristic"

    def __init__(self, settings: HfHeuristicSettings, limits: EngineLimits) -> None:
        self.settings = settings
        self.proposer = drafter("hf_heuristic", settings.proposer)
        self.k_max = max(1, min(limits.k_max, K_LIMIT))
        self.last = settings.k_start
        self.k = PerRequest()

    def decide(self, view: BatchView) -> Plan:
        """Return each request's own k."""
        start = min(self.settings.k_start if self.settings.transient else self.last, self.k_max)
        k = self.k.of(view, start)
        return rows_plan(view, self.proposer, k, Reason.HEURISTIC, default=(self.proposer, start))

    def observe(self, outcome: StepOutcome) -> None:
        """Move the k of every request that drafted."""
        ids = outcome.request_id.tolist()
        for row in np.flatnonzero(outcome.verified_k > 0):
            k = int(outcome.requested_k[row])
            all_held = outcome.accepted[row] == outcome.verified_k[row]
            self.last = min(k + 2, self.k_max) if all_held else max(1, k - 1)
            self.k.put(ids[row], self.last)
        self.k.saw(outcome)

    def state(self) -> dict[str, Array]:
        """Return the k of every request that has one, and the last one set."""
        return {**self.k.state(), "last": np.asarray(self.last)}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if set(state) != set(self.state()):
            raise ValueError("hf_heuristic: the state is incomplete or of another policy")
        self.k.load(state)
        self.last = int(state["last"])
