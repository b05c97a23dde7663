"""The seam under the step loop: what proposes, verifies and tells the time.

Torch is one backend (`torch_backend.py`), hazards and a virtual clock another (`virtual.py`).
Everything above this line is free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from parlay.engine.branches import Branch
from parlay.engine.kv_cache import BlockCache
from parlay.engine.request import Request, TokenLogprob
from parlay.engine.tree import Trees
from parlay.policies.policy import EngineLimits
from parlay.policies.types import PROPOSERS, Array, Fitted, Plan


@dataclass(slots=True)
class Lookup:
    """What the n-gram knows before the step: match_tokens i32 [rows], the longest suffix seen
    before, and tokens i64 [rows, depth], what followed it then (-1: nothing).

    match_count and guess_count i32 [rows]: how often that suffix was seen, and how often the first
    of `tokens` followed it; [0] from a backend that does not count.
    """  # noqa: D205

    match_tokens: Array
    tokens: Array
    match_count: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    guess_count: Array = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(slots=True)
class Batch:
    """The rows of one step; the scheduler fills it, blocks for every row are reserved.

    chunk i32 [rows]: uncomputed tokens each row feeds the target, 1 while decoding. A row whose
    chunk ends at its last token emits. target and draft: block tables of the two models' caches by
    request. lookup: the n-gram's guesses for the rows. shadow_k, heads_k i32 [rows], or [0]: tokens
    that draft model and Medusa heads guess only to be observed, in rows that others draft for.
    """

    requests: list[Request]
    chunk: Array
    target: BlockCache
    draft: BlockCache
    lookup: Lookup
    shadow_k: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    heads_k: Array = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def emits(self) -> Array:
        """Return bool [rows]: whether this step yields a token for the row."""
        pending = np.asarray([r.pending for r in self.requests], np.int32)
        return np.equal(pending, self.chunk)


@dataclass(slots=True)
class Drafts:
    """What the proposers guessed; `propose` fills it.

    count i32 [rows]; tokens i64 [rows, K], -1 beyond count; confidences f32 [rows, K], each place's
    probability of acceptance as the drafter sees it before drawing, nan where it has none;
    read_by_draft i32 [rows]: how many of its own guesses the draft model has read for good, after
    every token of the row; -1 where it read nothing, or not all: caught_up says how many unread
    tokens it read of such rows. watched, heads_watched: guesses of rows with shadow_k and heads_k.
    draft_ms f32 [PROPOSERS] and draft_depth: what it cost. private: what the backend keeps for
    `verify` (the draft's distributions). unread: what it has yet to fill in of tokens, confidences
    and the watched, which `verify` does. branches: by row, what may stand beside its tokens; trees:
    what is verified where some of that pays, else None, and chains are.
    """

    count: Array
    tokens: Array
    confidences: Array
    read_by_draft: Array
    draft_ms: Array = field(default_factory=lambda: np.zeros(PROPOSERS, np.float32))
    draft_depth: int = 0
    private: Any = None
    unread: list[Any] = field(default_factory=list)
    caught_up: dict[int, int] = field(default_factory=dict)
    watched: dict[int, list[int]] = field(default_factory=dict)
    heads_watched: dict[int, list[int]] = field(default_factory=dict)
    branches: dict[int, list[Branch]] = field(default_factory=dict)
    trees: Trees | None = None


@dataclass(slots=True)
class Verified:
    """What the target says; `verify` fills it.

    accepted i32 [rows], drafted tokens that hold; tokens i64 [rows, K + 1], the accepted ones and
    the target's own next token, -1 beyond accepted + 1 and on rows that do not emit. padded_tokens:
    rows the target's pass really had. verify_ms: its time. logprobs: of the tokens of each row
    whose request asks for them. overlaps: sum min(p, q) at the first place of rows whose draft law
    is observed. on_chain i32 [rows]: of drafts that are trees, how many of the chain's own tokens
    are the first accepted ones; None where there are none.
    """

    accepted: Array
    tokens: Array
    padded_tokens: int
    verify_ms: float
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    overlaps: dict[int, float] = field(default_factory=dict)
    on_chain: Array | None = None


class Backend(Protocol):
    """A model, or the likeness of one."""

    def limits(self) -> EngineLimits:
        """Return what this backend can do."""
        ...

    def clock(self) -> float:
        """Return the time in seconds; only differences mean something."""
        ...

    def keeps(self, book: BlockCache) -> bool:
        """Say whether the target's cache holds what `book` accounts for: engines that share a
        backend overwrite each other's.
        """  # noqa: D205
        ...

    def lookup(self, requests: list[Request], depth: int) -> Lookup:
        """Ask the n-gram what it would draft for each request, up to `depth` tokens; cheap."""
        ...

    def propose(self, batch: Batch, fit: Fitted, plan: Plan | None) -> Drafts:
        """Draft up to fit.k tokens a row with fit.proposer; the draft model catches up first.

        The plan's stop rule may end a draft early, by its calibration of the confidences.
        """
        ...

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Run the target once over every row's chunk and its first verify_k drafts, and accept.

        A backend that filled `branches` verifies drafts.trees instead where there are some.
        """
        ...

    def launch(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Any:
        """Begin what `verify` does and return, `land` must follow; the pass goes on by itself where
        the backend can.
        """  # noqa: D205
        ...

    def land(self, flying: Any) -> Verified:
        """Wait for what was launched."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has finished or was preempted."""
        ...
