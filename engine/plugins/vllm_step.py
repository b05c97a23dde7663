"""What the plugin keeps of vLLM's steps while they are under way, and reads off their ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlay.engine.plugins.adapter import Decision, Load
from parlay.engine.plugins.followed import Order
from parlay.engine.plugins.tracked import Standing
from parlay.engine.plugins.vllm_rows import Group, Row
from parlay.policies.types import NGRAM, PROPOSERS, Array, Fitted, PlanSource, Truncated


@dataclass(slots=True)
class Drafting:
    """A decision, whom it is for, and what came of it: drafts that the next step verifies.

    By row: proposer, k, context (tokens when it was made), and of its drafts what was kept.
    draft_ms of vLLM's proposer, lookup_ms of ours.
    """

    decision: Callable[[], Decision]
    group: Group
    context: list[int]
    proposer: list[int]
    k: list[int]
    drafted: list[int]
    depth: int = 0
    draft_ms: float = 0.0
    lookup_ms: float = 0.0

    def take(self, decision: Decision) -> None:
        """Go by another decision for the same requests."""
        self.decision = lambda: decision
        self.proposer, self.k = decision.fit.proposer.tolist(), decision.fit.verify_k.tolist()

    def spent_ms(self, column: int) -> list[float]:
        """Return what the drafts took by proposer; column: vLLM's."""
        spent = [0.0] * PROPOSERS
        spent[NGRAM] = self.lookup_ms
        spent[column] += self.draft_ms
        return spent


def drafting_of(decision: Decision, group: Group, context: list[int]) -> Drafting:
    """Return what a decision for these requests begins."""
    fit, none = decision.fit, [0] * len(group)
    by, k = fit.proposer.tolist(), fit.verify_k.tolist()
    return Drafting(lambda: decision, group, context, by, k, none)


def by_order(
    group: Group, order: Order, step_id: int, context: list[int], match: list[int]
) -> Drafting:
    """Return what a plan that serves again begins; the decision is made up when it is told of."""
    by, k = group.by_order(order, context, match)
    decision = functools.partial(_decision, group, order, step_id, context, match, by, k)
    return Drafting(decision, group, context, by, k, [0] * len(group))


def _decision(
    group: Group,
    order: Order,
    step_id: int,
    context: list[int],
    match: list[int],
    by: list[int],
    ks: list[int],
) -> Decision:
    tokens, k, none = np.array(context, np.int32), np.array(ks, np.int32), group.columns.no_lag
    output = tokens - group.prompt_tokens
    standing = Standing(tokens, output, none, k, np.array(match, np.int32))
    view = group.columns.view(standing, Load(kv_tokens=sum(context)))
    view.step_id = step_id
    fit = Fitted(
        proposer=np.array(by, np.uint8),
        k=k,
        verify_k=k,
        follows=order.follows(view.request_id.tolist()),
        shadow=np.zeros(len(k), bool),
        propensity=np.ones(len(k), np.float32),
        reason=np.zeros(len(k), np.uint8),
    )
    return Decision(view, order.plan, PlanSource.LOCAL, fit)


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

    before, after: tokens that each request had; ended: which this step has ended.
    """

    step: Step
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


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


def ended(scheduler: Any, group: Group) -> list[int]:
    """Return the rows of requests that this step has ended."""
    finished = scheduler.finished_req_ids
    if not finished or group.place.keys().isdisjoint(finished):
        return []
    return [place for name, place in group.place.items() if name in finished]


def endings(group: Group, rows: list[int]) -> Array | None:
    """Return what ended these rows of a group, u8 [rows]; None where there are none."""
    if not rows:
        return None
    cut = np.zeros(len(group), np.uint8)
    cut[rows] = [_truncated(group.sources[row]) for row in rows]
    return cut


def _truncated(source: Any) -> Truncated:
    if source.status.name == "FINISHED_LENGTH_CAPPED":
        return Truncated.LENGTH
    if source.status.name != "FINISHED_STOPPED":
        return Truncated.NONE
    return Truncated.EOS if source.stop_reason is None else Truncated.STOP
