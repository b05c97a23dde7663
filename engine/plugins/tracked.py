"""What a plugin says of its requests before a step, and the BatchView made of it. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.engine.request import SpeculationParams
from parlay.policies.policy import EngineLimits
from parlay.policies.types import K_LIMIT, BatchView, task_id


@dataclass(slots=True, eq=False)
class Tracked:
    """One request of an engine. The plugin writes the middle part anew before each step.

    context_tokens and output_tokens so far; prefill_tokens of prompt in the coming step (such a
    request cannot draft); room: most tokens that length and cache let it draft; match_tokens: the
    n-gram's match (1 where the engine's own n-gram does not say); draft_kv_lag: tokens the draft
    model has yet to read. seeded: its draws are its own. The adapter writes the rest.
    """

    request_id: int
    speculation: SpeculationParams

    context_tokens: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    temperature: float = 0.0
    room: int = K_LIMIT
    match_tokens: int = 0
    draft_kv_lag: int = 0
    seeded: bool = False

    recent_accept: float = 1.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Load:
    """The engine as a whole: requests waiting, blocks of KV cache (0 in all: it does not say), and
    KV tokens held.
    """  # noqa: D205

    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    kv_tokens: int = 0


def view_of(rows: Sequence[Tracked], limits: EngineLimits, load: Load | None = None) -> BatchView:
    """Return what a policy may know of the requests of the coming step."""
    load = load or Load()
    mask, k_max = limits.proposer_mask, limits.k_max
    prefill = np.asarray([r.prefill_tokens for r in rows], np.int32)
    max_k = np.asarray([max(0, min(r.room, r.speculation.max_k, k_max)) for r in rows], np.int32)
    allowed = [r.speculation.proposer_mask & mask for r in rows]
    targets = [r.speculation.tpot_target_ms for r in rows]
    return BatchView(
        request_id=np.asarray([r.request_id for r in rows], np.uint64),
        task=np.asarray([task_id(r.speculation.task) for r in rows], np.uint32),
        context_tokens=np.asarray([r.context_tokens for r in rows], np.int32),
        output_tokens=np.asarray([r.output_tokens for r in rows], np.int32),
        prefill_tokens=prefill,
        temperature=np.asarray([r.temperature for r in rows], np.float32),
        max_k=np.where(prefill > 0, 0, max_k).astype(np.int32),
        proposer_mask=np.asarray(allowed, np.uint8),
        tpot_target_ms=np.asarray(targets, np.float32),
        recent_accept=np.asarray([r.recent_accept for r in rows], np.float32),
        match_tokens=np.asarray([r.match_tokens for r in rows], np.int32),
        draft_kv_lag=np.asarray([r.draft_kv_lag for r in rows], np.int32),
        seeded=np.asarray([r.seeded for r in rows], bool),
        running=len(rows),
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        kv_tokens=load.kv_tokens or sum(r.context_tokens for r in rows),
        bucket_edges=np.asarray(limits.bucket_edges, np.int32),
    )
