"""What a plugin says of its requests before a step, and the BatchView made of it. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlay.engine.request import SpeculationParams
from parlay.policies.policy import EngineLimits
from parlay.policies.types import K_LIMIT, Array, BatchView, task_id


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


@dataclass(slots=True)
class Standing:
    """The middle part of a Tracked for many requests at once, each i32 [rows].

    room: 0 or more, and 0 where prompt is computed. draft_kv_lag None: nothing to read.
    """

    context_tokens: Array
    output_tokens: Array
    prefill_tokens: Array
    room: Array
    match_tokens: Array
    draft_kv_lag: Array | None = None


class Columns:
    """What stays the same of some requests, field by field: for views of them step after step."""

    def __init__(self, rows: Sequence[Tracked], limits: EngineLimits) -> None:
        self.rows, asked = rows, [r.speculation for r in rows]
        self.request_id = np.asarray([r.request_id for r in rows], np.uint64)
        self.task = np.asarray([task_id(s.task) for s in asked], np.uint32)
        self.temperature = np.asarray([r.temperature for r in rows], np.float32)
        self.seeded = np.asarray([r.seeded for r in rows], bool)
        mask = limits.proposer_mask
        self.proposer_mask = np.asarray([s.proposer_mask & mask for s in asked], np.uint8)
        self.most_k = np.asarray([min(s.max_k, limits.k_max) for s in asked], np.int32)
        self.tpot_target_ms = np.asarray([s.tpot_target_ms for s in asked], np.float32)
        self.bucket_edges = np.asarray(limits.bucket_edges, np.int32)
        self.no_lag = np.zeros(len(rows), np.int32)

    def view(self, at: Standing, load: Load) -> BatchView:
        """Return what a policy may know of these requests now; nobody may write to its arrays."""
        lag = self.no_lag if at.draft_kv_lag is None else at.draft_kv_lag
        return BatchView(
            request_id=self.request_id,
            task=self.task,
            context_tokens=at.context_tokens,
            output_tokens=at.output_tokens,
            prefill_tokens=at.prefill_tokens,
            temperature=self.temperature,
            max_k=np.minimum(at.room, self.most_k),
            proposer_mask=self.proposer_mask,
            tpot_target_ms=self.tpot_target_ms,
            recent_accept=np.asarray([r.recent_accept for r in self.rows], np.float32),
            match_tokens=at.match_tokens,
            draft_kv_lag=lag,
            seeded=self.seeded,
            running=len(self.rows),
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            kv_tokens=load.kv_tokens or int(at.context_tokens.sum()),
            bucket_edges=self.bucket_edges,
        )


def standing_of(rows: Sequence[Tracked]) -> Standing:
    """Return the middle part of each."""
    return Standing(
        context_tokens=np.asarray([r.context_tokens for r in rows], np.int32),
        output_tokens=np.asarray([r.output_tokens for r in rows], np.int32),
        prefill_tokens=np.asarray([r.prefill_tokens for r in rows], np.int32),
        room=np.asarray([0 if r.prefill_tokens > 0 else max(r.room, 0) for r in rows], np.int32),
        match_tokens=np.asarray([r.match_tokens for r in rows], np.int32),
        draft_kv_lag=np.asarray([r.draft_kv_lag for r in rows], np.int32),
    )


def view_of(rows: Sequence[Tracked], limits: EngineLimits, load: Load | None = None) -> BatchView:
    """Return what a policy may know of the requests of the coming step.

    Where the same requests are decided for step after step, `Columns` kept from one to the next
    make a view of `standing_of` sooner, and let a plan serve again sooner.
    """
    return Columns(rows, limits).view(standing_of(rows), load or Load())
