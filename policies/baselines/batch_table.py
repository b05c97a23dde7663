"""k by how many requests run, from a table that somebody measured beforehand.

Source: TensorRT-LLM's `draft_len_schedule` and vLLM's `num_speculative_tokens_per_batch_size`. A
key here is TensorRT-LLM's: the largest number of running requests that an entry serves, so {4: 4,
8: 2, 32: 1} is up_to_running=4,8,32 k=4,2,1, and beyond the last entry nothing is drafted. vLLM
writes both ends of each range instead: [[1, 4, 4], [5, 8, 2], [9, 32, 1]].
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import batch_plan, check_k, drafter
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import BatchView, Plan


@dataclass(slots=True, frozen=True)
class BatchTableSettings:
    """proposer; up_to_running, rising upper bounds of running requests; k of each, 0 is off."""

    proposer: str = "draft_model"
    up_to_running: tuple[int, ...] = (4, 8, 32)
    k: tuple[int, ...] = (4, 2, 1)

    def __post_init__(self) -> None:
        drafter("batch_table", self.proposer)
        bounds = self.up_to_running
        if not bounds or len(bounds) != len(self.k):
            raise ValueError(
                f"batch_table: up_to_running and k need one entry a range,"
                f" not {len(bounds)} and {len(self.k)}"
            )
        if bounds[0] < 1 or any(b <= a for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"batch_table: up_to_running must rise from 1 or more, not {bounds}")
        for k in self.k:
            check_k("batch_table", "k", k)


@register("batch_table", BatchTableSettings)
class BatchTable(Stateless):
    """One k for the batch, looked up by the number of running requests."""

    name = "batch_table"

    def __init__(self, settings: BatchTableSettings, limits: EngineLimits) -> None:
        del limits
        self.proposer = drafter("batch_table", settings.proposer)
        self.bounds = np.asarray(settings.up_to_running)
        self.k = np.asarray([*settings.k, 0])

    def decide(self, view: BatchView) -> Plan:
        """Return the entry of this batch for every row."""
        k = int(self.k[np.searchsorted(self.bounds, view.running)])
        return batch_plan(view, self.proposer, k)
