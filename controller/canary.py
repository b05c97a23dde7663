"""A candidate that decides for a share of the requests: which, in one plan, and how they fare.

Requests of a batch share its time, so that this judges safety. Step time is laid to rows: that of a
step without drafts evenly, what a step takes beyond it by drafted tokens. A request's goodput is
its tokens over its time; a request of either kind that ended makes a pair.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from dataclasses import replace

import numpy as np

from parlay.policies.allocate import fit_plan
from parlay.policies.cost import StepTime
from parlay.policies.log_schema import in_sample
from parlay.policies.switchback import PREFILL_MOST
from parlay.policies.types import NO_BUDGET, Array, BatchView, Plan, Reason, StepOutcome

LEAST_TOKENS = 8
"""A request that was seen for fewer says nothing."""
_MOST_OPEN, _MOST_ENDED = 8192, 64


def on_canary(engine_id: str, request_id: Array, share: float) -> Array:
    """Return bool [rows]: is this request on canary at `share`.

    By a hash of engine and request: the same everywhere, and for every larger share too.
    """
    salt = np.frombuffer(hashlib.blake2b(engine_id.encode(), digest_size=8).digest(), "<u8")[0]
    return in_sample(request_id.astype(np.uint64) ^ salt, share)


def mixed(plan: Plan, candidate: Plan, view: BatchView, theirs: Array, share: float) -> Plan:
    """Return the incumbent's plan with the candidate's rows where `theirs` bool [rows] holds.

    Prices, budget, stop rule and defaults are the batch's and stay the incumbent's; the budget
    grows or shrinks by what the candidate's rows draft more or less, and these are not chosen anew
    when their matches change. Both plans must be of the view's rows, in its order.
    """
    fit = fit_plan(candidate, view)
    k = np.where(theirs, fit.k, plan.k).astype(np.int16)
    proposer = np.where(theirs, fit.proposer, plan.proposer).astype(np.uint8)
    reason = candidate.reason if plan.survival is None else np.uint8(Reason.EXPLORE)
    same = (candidate.proposer == plan.proposer) & (candidate.k == plan.k)
    ours, other = share * candidate.propensity, (1.0 - share) * plan.propensity
    propensity = np.where(same, ours + other, np.where(theirs, ours, other))
    budget = plan.budget_tokens
    if budget != NO_BUDGET:
        budget = max(0, budget + int(k.sum()) - int(plan.k.sum()))
    return replace(
        plan,
        proposer=proposer,
        k=k,
        shadow=np.where(theirs, candidate.shadow, plan.shadow),
        reason=np.where(theirs, reason, plan.reason).astype(np.uint8),
        propensity=propensity.astype(np.float32),
        budget_tokens=budget,
    )


class Arms:
    """Tokens and laid time of each request, on canary or not, until it ends."""

    def __init__(self) -> None:
        self._step_time = StepTime()
        # By request: tokens, ms, on canary.
        self._open: dict[int, tuple[float, float, bool]] = {}
        # Log goodput of requests that ended and wait for a partner: others, on canary.
        self._ended: tuple[deque[float], deque[float]] = (
            deque(maxlen=_MOST_ENDED),
            deque(maxlen=_MOST_ENDED),
        )

    def observe(self, outcome: StepOutcome, theirs: Array, counts: bool) -> list[float]:
        """Learn from a step; return log-ratios of pairs of requests that have ended.

        counts: the step was decided by request; others teach what steps take, and end requests.
        """
        self._step_time.observe(outcome, 0.0)
        rows = outcome.emitted > 0
        counts = counts and outcome.step_ms > 0.0
        if counts and outcome.prefill_tokens <= PREFILL_MOST and rows.any():
            self._book(outcome, rows, theirs)
        for request_id in outcome.request_id[outcome.truncated_by > 0].tolist():
            self._end(request_id)
        pairs, (others, ours) = [], self._ended
        while others and ours:
            pairs.append(ours.popleft() - others.popleft())
        return pairs

    def _book(self, outcome: StepOutcome, rows: Array, theirs: Array) -> None:
        count, drafted = int(rows.sum()), outcome.drafted_k[rows].astype(float)
        plain_ms = float(outcome.step_ms)
        if drafted.any() and self._step_time.started:
            fed = np.array([float(count + outcome.prefill_tokens)])
            least_ms = float(self._step_time.verify_ms(fed, float(outcome.kv_tokens))[0])
            plain_ms = min(outcome.step_ms, least_ms)
        extra_ms = (outcome.step_ms - plain_ms) / max(float(drafted.sum()), 1.0)
        laid_ms = plain_ms / count + extra_ms * drafted
        columns = (outcome.request_id[rows], outcome.emitted[rows], laid_ms, theirs[rows])
        for request_id, emitted, ms, ours in zip(*(c.tolist() for c in columns), strict=True):
            tokens, before_ms, arm = self._open.get(request_id, (0.0, 0.0, ours))
            if arm is not ours:  # the share was changed: what was under the other policy is dropped
                tokens, before_ms = 0.0, 0.0
            self._open[request_id] = (tokens + emitted, before_ms + ms, ours)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _end(self, request_id: int) -> None:
        tokens, ms, ours = self._open.pop(request_id, (0.0, 0.0, False))
        if tokens >= LEAST_TOKENS:
            self._ended[ours].append(math.log(tokens / ms))
