"""What the plugin keeps of vLLM's steps while they are under way, and reads off their ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlay.engine.plugins.adapter import Decision, Load
from parlay.engine.plugins.vllm_rows import Group, Row
from parlay.policies.types import NGRAM, PROPOSERS, Array, Truncated


@dataclass(slots=True)
class Drafting:
    """A decision, whom it is for, and what came of it: drafts that the next step verifies.

    drafted, by row: what was kept of its drafts. draft_ms of vLLM's proposer, lookup_ms of ours.
    """

    decision: Decision
    group: Group
    drafted: list[int]
    depth: int = 0
    draft_ms: float = 0.0
    lookup_ms: float = 0.0

    def spent_ms(self, column: int) -> list[float]:
        """Return what the drafts took by proposer; column: vLLM's."""
        spent = [0.0] * PROPOSERS
        spent[NGRAM] = self.lookup_ms
        spent[column] += self.draft_ms
        return spent


@dataclass(slots=True)
class Step:
    """A step under way: what vLLM scheduled, the drafts it verifies, those it makes.

    started: whose `in_flight` counts it.
    """

    out: Any
    start_s: float
    verifies: Drafting | None
    makes: Drafting | None = None
    started: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """A step between vLLM's verdict and its bookkeeping: by row as in StepResult.

    outputs: tokens that each request had put out before.
    """

    step: Step
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def load_of(scheduler: Any, kv_tokens: int) -> Load:
    """Return how full vLLM is."""
    pool = scheduler.kv_cache_manager.block_pool
    free, waiting = pool.get_num_free_blocks(), len(scheduler.waiting)
    return Load(waiting, free, pool.num_gpu_blocks, kv_tokens)


def prompt_tokens(out: Any) -> int:
    """Return how many tokens of a step are of prompts (one of a single token counts as a draft)."""
    drafts = out.scheduled_spec_decode_tokens
    decoding = len(out.num_scheduled_tokens) + sum(map(len, drafts.values()))
    if out.total_num_scheduled_tokens == decoding:
        return 0
    extra = ((n, 1 + len(drafts.get(name, ()))) for name, n in out.num_scheduled_tokens.items())
    return sum(n for n, decoding in extra if n > decoding)


def endings(scheduler: Any, group: Group) -> Array | None:
    """Return what ended requests in this step, u8 [rows]; None where nothing did."""
    if group.place.keys().isdisjoint(scheduler.finished_req_ids):
        return None
    return np.array([_truncated(source) for source in group.sources], np.uint8)


def _truncated(source: Any) -> Truncated:
    if source.status.name == "FINISHED_LENGTH_CAPPED":
        return Truncated.LENGTH
    if source.status.name != "FINISHED_STOPPED":
        return Truncated.NONE
    return Truncated.EOS if source.stop_reason is None else Truncated.STOP
