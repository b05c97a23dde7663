"""The engine's backend in the simulator: latents instead of models, a cost model and a clock.

The engine's own scheduler, block accounting and step loop run on it. The text of a request is its
positions: a guess that holds says the position, one that does not says the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from parlay.engine.backend import Batch, Drafts, Lookup, Verified
from parlay.engine.kv_cache import BlockCache
from parlay.engine.request import Request
from parlay.policies.allocate import chances
from parlay.policies.cost import behind
from parlay.policies.policy import EngineLimits
from parlay.policies.types import (
    DRAFT_MODEL,
    ENTROPY_SCALE,
    MEDUSA,
    NGRAM,
    Array,
    Fitted,
    Plan,
    StopKind,
    StopRule,
)
from parlay.sim.costs import CostModel, Work
from parlay.sim.latent import Luck

ENTROPY_CHOICES = 20.0
"""A drafter of confidence c is given the entropy of c on one token and the rest on so many."""


@dataclass(slots=True)
class SimBackend:
    """Keeps a virtual clock that moves in propose and verify.

    task_index: the luck's index of each task's tag. catches_up: whether the draft model pays for
    what it has not read.
    """

    luck: Luck
    costs: CostModel
    engine: EngineLimits
    task_index: dict[str, int]
    catches_up: bool = False
    time_s: float = 0.0
    rows: dict[int, int] = field(default_factory=dict)

    def limits(self) -> EngineLimits:
        """Return what was set."""
        return self.engine

    def clock(self) -> float:
        """Return the virtual time."""
        return self.time_s

    def forget(self, request: Request) -> None:
        """Give a finished request's row back; one that was only preempted keeps its luck."""
        if request.finished:
            self.luck.release(self.rows.pop(request.request_id))

    def keeps(self, book: BlockCache) -> bool:
        """Say yes: nothing is kept that others could overwrite."""
        return True

    def row(self, request: Request) -> int:
        """Return the luck's row of a request, drawn when it is first seen."""
        found = self.rows.get(request.request_id)
        if found is None:
            task = self.task_index[request.speculation.task]
            tokens = request.sampling.max_tokens
            found = self.luck.admit(request.request_id, task, tokens)
            self.rows[request.request_id] = found
        return found

    def places(self, requests: Sequence[Request]) -> tuple[Array, Array]:
        """Return the luck's rows and the output positions of requests."""
        rows = np.fromiter((self.row(r) for r in requests), np.intp, len(requests))
        return rows, np.fromiter((r.output_tokens for r in requests), np.intp, len(requests))

    def lookup(self, requests: list[Request], depth: int) -> Lookup:
        """Return the n-gram's guesses of every request that decodes."""
        rows, at = self.places(requests)
        decodes = np.fromiter((r.pending == 1 for r in requests), bool, len(requests))
        match = np.where(decodes, self.luck.match[rows, at], 0).astype(np.int32)
        tokens = _guesses(_lengths(requests), self.luck.held(rows, at, NGRAM), depth)
        offered = np.where(match > 0, self.luck.offered(rows, at, NGRAM), 0)
        return Lookup(match, np.where(np.arange(depth) < offered[:, None], tokens, -1))

    def propose(self, batch: Batch, fit: Fitted, plan: Plan | None) -> Drafts:
        """Draft what would hold; the plan's stop rule may end a draft early."""
        count, confidences = fit.k.astype(np.int32), np.full((len(batch), 1), np.nan, np.float32)
        active = np.flatnonzero(fit.k)
        drafts = Drafts(
            count=count,
            tokens=np.full((len(batch), 1), -1, np.int64),
            confidences=confidences,
            read_by_draft=np.full(len(batch), -1, np.int32),
        )
        if not len(active):
            return drafts
        requests = [batch.requests[r] for r in active]
        rows, at = self.places(requests)
        drafts.count, passes, drafts.confidences = drafted(self.luck, active, rows, at, fit, plan)
        depth = drafts.confidences.shape[1]
        held = self.luck.held(rows, at, fit.proposer[active])
        tokens = _guesses(_lengths(requests), held, depth)
        beyond = np.arange(depth) >= drafts.count[active][:, None]
        drafts.tokens = np.full((len(batch), depth), -1, np.int64)
        drafts.tokens[active] = np.where(beyond, -1, tokens)
        self._charge(batch, fit, passes, drafts)
        return drafts

    def _charge(self, batch: Batch, fit: Fitted, passes: Array, drafts: Drafts) -> None:
        """Let the clock run for what drafting takes."""
        modelled = np.flatnonzero((fit.proposer == DRAFT_MODEL) & (fit.k > 0))
        drafts.read_by_draft[modelled] = np.maximum(drafts.count[modelled] - 1, 0)
        drafts.draft_depth = int(passes[modelled].max(initial=0))
        requests = [batch.requests[r] for r in modelled]
        lag = np.array([len(r.tokens) - r.draft_computed for r in requests], np.int64)
        work = Work(
            tokens=0,
            requests=0,
            kv_tokens=0,
            draft_rows=tuple(int((passes[modelled] > j).sum()) for j in range(drafts.draft_depth)),
            draft_kv_tokens=sum(r.computed for r in requests),
            medusa_rows=int(((fit.proposer == MEDUSA) & (fit.k > 0)).sum()),
            ngram_rows=int(((fit.proposer == NGRAM) & (fit.k > 0)).sum()),
            catch_up_tokens=int(behind(lag).sum()) if self.catches_up else 0,
        )
        drafts.draft_ms = self.costs.time(work).draft_ms
        self.time_s += 1e-3 * float(drafts.draft_ms.sum())

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Accept guesses while they say their position; the bonus token says the next."""
        k = np.minimum(verify_k, drafts.count)
        width = int(k.max(initial=0))
        start = _lengths(batch.requests)
        text = start[:, None] + np.arange(width + 1)
        right = drafts.tokens[:, :width] == text[:, :width]
        right &= np.arange(width) < k[:, None]
        emits = batch.emits
        accepted = np.where(emits, np.cumprod(right, axis=1).sum(axis=1), 0).astype(np.int32)
        emitted = np.where(emits, accepted + 1, 0)
        tokens = np.where(np.arange(width + 1) < emitted[:, None], text, -1)
        kv_tokens = sum(r.computed for r in batch.requests)
        fed = int(batch.chunk.sum() + k.sum())
        took = self.costs.time(Work(fed, int(emits.sum()), kv_tokens))
        self.time_s += 1e-3 * (took.verify_ms + took.overhead_ms)
        return Verified(accepted, tokens, took.padded_tokens, took.verify_ms)

    def launch(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Verify: nothing goes on by itself on a virtual clock."""
        return self.verify(batch, drafts, verify_k)

    def land(self, flying: Verified) -> Verified:
        """Return what was verified."""
        return flying


def drafted(
    luck: Luck, active: Array, rows: Array, at: Array, fit: Fitted, plan: Plan | None
) -> tuple[Array, Array, Array]:
    """Return tokens kept i32, passes run i32 and confidences f32 [batch, K] of a step's drafts.

    active [n]: the batch's rows that draft; rows, at [n]: the luck's rows, and output positions.
    """
    who, depth = fit.proposer[active], int(fit.k.max())
    count, confidences = fit.k.astype(np.int32), np.full((len(fit.k), depth), np.nan, np.float32)
    count[active] = np.minimum(fit.k[active], luck.offered(rows, at, who))
    passes = count.copy()
    confident = np.flatnonzero(who != NGRAM)
    if len(confident):
        mine = active[confident]
        shown = luck.confidence(rows[confident], at[confident], who[confident])[:, :depth]
        stop = plan.stop_rule if plan else StopRule()
        kept, passes[mine] = _stopped(stop, plan, who[confident], count[mine], shown)
        count[mine] = kept
        seen = np.arange(depth) < passes[mine][:, None]
        confidences[mine] = np.where(seen, shown, np.nan)
    return count, passes, confidences


def _lengths(requests: Sequence[Request]) -> Array:
    return np.fromiter((len(r.tokens) for r in requests), np.int64, len(requests))


def _guesses(start: Array, held: Array, depth: int) -> Array:
    """Return i64 [n, depth]: positions while the guess holds, off by one from there on."""
    place = np.arange(depth)
    return start[:, None] + place + (place >= held[:, None])


def _stopped(
    stop: StopRule, plan: Plan | None, who: Array, k: Array, confidence: Array
) -> tuple[Array, Array]:
    """Return tokens kept and passes run i32 [n] of drafts that a stop rule may end early."""
    depth = confidence.shape[1]
    if stop.kind is StopKind.PROBABILITY:  # the token that falls below is kept
        low = confidence < stop.threshold
        first = np.where(low.any(axis=1), low.argmax(axis=1) + 1, depth)
        kept = np.minimum(k, first)
        return kept, kept
    low = np.zeros(confidence.shape, bool)
    if stop.kind is StopKind.SURVIVAL:
        assert plan is not None, "a stop rule is a plan's"
        low = np.cumprod(chances(plan, who, confidence), axis=1) < stop.threshold
    elif stop.kind is StopKind.ENTROPY:
        low = np.sqrt(ENTROPY_SCALE * _entropy(confidence)) > stop.threshold
        low[:, 0] = False
    first = np.where(low.any(axis=1), low.argmax(axis=1), depth)
    return np.minimum(k, first), np.minimum(k, first + 1)


def _entropy(confidence: Array) -> Array:
    """Return the entropy in nats of a law with `confidence` on one token, the rest even."""
    p = np.clip(confidence, 1e-6, 1.0 - 1e-6)
    entropy: Array = -p * np.log(p) - (1.0 - p) * np.log((1.0 - p) / ENTROPY_CHOICES)
    return entropy
