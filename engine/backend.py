"""The seam under the step loop: what proposes, verifies and tells the time.

Torch is one backend (`torch_backend.py`), hazards and a virtual clock another (`virtual.py`).
Everything above this line is free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from parlay.engine.kv_cache import BlockCache
from parlay.engine.request import Request
from parlay.policies.policy import EngineLimits
from parlay.policies.types import PROPOSERS, Array, StopRule


@dataclass(slots=True)
class Batch:
    """The rows of one step; the scheduler fills it, blocks for every row are reserved.

    chunk i32 [rows]: uncomputed tokens each row feeds the target, 1 while decoding. A row whose chunk
    ends at its last token emits. target and draft: block tables of the two models' caches by request.
    """

    requests: list[Request]
    chunk: Array
    target: BlockCache
    draft: BlockCache | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def emits(self) -> Array:
        """Return bool [rows]: does this step yield a token for the row?"""
        return np.asarray([r.pending for r in self.requests], np.int32) == self.chunk


@dataclass(slots=True)
class Drafts:
    """What the proposers guessed; `propose` fills it.

    count i32 [rows]; tokens i64 [rows, K], -1 beyond count; confidences f32 [rows, K], each place's
    probability of acceptance as the drafter sees it before drawing, nan where it has none;
    match_tokens i32 [rows]. draft_ms f32 [PROPOSERS] and draft_depth: what it cost. private: what the
    backend keeps for `verify` (the draft's distributions).
    """

    count: Array
    tokens: Array
    confidences: Array
    match_tokens: Array
    draft_ms: Array = field(default_factory=lambda: np.zeros(PROPOSERS, np.float32))
    draft_depth: int = 0
    private: Any = None


@dataclass(slots=True)
class Verified:
    """What the target says; `verify` fills it.

    accepted i32 [rows], drafted tokens that hold; tokens i64 [rows, K + 1], the accepted ones and the
    target's own next token, -1 beyond accepted + 1 and on rows that do not emit. padded_tokens: rows
    the target's pass really had. verify_ms: its time.
    """

    accepted: Array
    tokens: Array
    padded_tokens: int
    verify_ms: float


class Backend(Protocol):
    """A model, or the likeness of one."""

    def limits(self) -> EngineLimits:
        """Return what this backend can do."""
        ...

    def clock(self) -> float:
        """Return the time in seconds; only differences mean something."""
        ...

    def match_tokens(self, requests: list[Request]) -> Array:
        """Return the n-gram's longest suffix match of each request, i32 [rows]."""
        ...

    def propose(self, batch: Batch, proposer: Array, k: Array, stop: StopRule) -> Drafts:
        """Draft up to k tokens a row with its proposer; the draft model catches up first."""
        ...

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Run the target once over every row's chunk and its first verify_k drafts, and accept."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has finished or was preempted."""
        ...
