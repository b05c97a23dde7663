"""A cost model of this very engine, fitted on steps that it ran.

What a step takes is a curve over the tokens it verifies, rising between knots, beside lines in the
KV it reads, its rows, and what the draft model does. The draft model is charged with all that its
steps take more than others of as many tokens: its passes drive the target's weights out of the
caches, which its own clock does not show (SmolLM2-135M on one core: up to 2.5 ms a step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from parlay.policies.cost import KV_UNIT, behind
from parlay.policies.types import DRAFT_MODEL, NGRAM, PROPOSERS, Array, BatchView, StepOutcome
from parlay.sim.costs import StepTime, Work

_KNOTS = np.array([1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 192, 256, 384, 512])
"""Tokens of a pass. CPU kernels take 16 at a time, so that one more may cost as much as many."""
_LEAST_STEPS = 64
_ROUNDS = 6
_RIDGE = 1e-3
"""A thousandth of a step's relative error: only decides what no step showed."""


@dataclass(slots=True, frozen=True)
class StepCosts:
    """A cost model of one engine: curve_ms at `knots` (tokens), beyond_ms a token after the last.

    kv_ms a token of KV, request_ms a row that decodes; of the draft model: drafting_ms where it
    runs at all, a pass, a token drafted and one caught up; ngram_row_ms. The host's part is within
    the verify pass.
    """

    knots: Array
    curve_ms: Array
    beyond_ms: float
    kv_ms: float
    request_ms: float
    drafting_ms: float
    pass_ms: float
    token_ms: float
    catch_up_ms: float
    ngram_row_ms: float
    spread: float
    name: str = "fitted on this engine"
    bucket_edges: tuple[int, ...] = ()

    def time(self, work: Work) -> StepTime:
        """Return what `work` takes."""
        verify_ms, draft_ms = 0.0, np.zeros(PROPOSERS, np.float32)
        if work.tokens:
            verify_ms = float(np.interp(work.tokens, self.knots, self.curve_ms))
            verify_ms += self.beyond_ms * max(work.tokens - float(self.knots[-1]), 0.0)
            verify_ms += self.kv_ms * work.kv_tokens + self.request_ms * work.requests
        if work.draft_rows or work.catch_up_tokens:
            draft_ms[DRAFT_MODEL] = (
                self.drafting_ms
                + self.pass_ms * len(work.draft_rows)
                + self.token_ms * sum(work.draft_rows)
                + self.catch_up_ms * work.catch_up_tokens
            )
        draft_ms[NGRAM] = self.ngram_row_ms * work.ngram_rows
        return StepTime(verify_ms, draft_ms, 0.0, work.tokens)


@dataclass(slots=True)
class StepLog:
    """Steps without prompts as `fit_costs` wants them: what each did, and the ms it took."""

    did: list[tuple[float, ...]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def add(self, view: BatchView, outcome: StepOutcome) -> None:
        """Note a step; one that computes prompts is left out."""
        if outcome.prefill_tokens:
            return
        modelled = outcome.proposer == DRAFT_MODEL
        self.did.append(
            (
                float(outcome.padded_tokens),
                outcome.kv_tokens / KV_UNIT,
                float((outcome.emitted > 0).sum()),
                float(outcome.draft_depth > 0),
                float(outcome.draft_depth),
                float(outcome.drafted_k[modelled].sum()),
                float(behind(view.draft_kv_lag[modelled]).sum()),
                float((outcome.proposer == NGRAM).sum()),
            )
        )
        self.step_ms.append(outcome.step_ms)


def fit_costs(log: StepLog, bucket_edges: Sequence[int] = ()) -> StepCosts:
    """Return the costs of least squared relative error, none below 0; far outliers weigh little.

    Raises ValueError for fewer steps than 64.
    """
    if len(log.did) < _LEAST_STEPS:
        raise ValueError(
            f"{len(log.did)} steps are too few to learn costs from, {_LEAST_STEPS} the least:"
            " give more prompts or longer answers"
        )
    did, step_ms = np.array(log.did), np.array(log.step_ms)
    most = int(np.searchsorted(_KNOTS, did[:, 0].max()))
    knots = _KNOTS[: max(most, 1) + 1]
    x = _columns(did, knots)
    weights, spread = _robust(x, step_ms)
    curve = np.cumsum(weights[: len(knots)])
    kv, request, drafting, a_pass, token, catch_up, ngram = weights[len(knots) :].tolist()
    return StepCosts(
        knots,
        curve,
        beyond_ms=float((curve[-1] - curve[0]) / (knots[-1] - knots[0])),
        kv_ms=kv / KV_UNIT,
        request_ms=request,
        drafting_ms=drafting,
        pass_ms=a_pass,
        token_ms=token,
        catch_up_ms=catch_up,
        ngram_row_ms=ngram,
        spread=spread,
        bucket_edges=tuple(bucket_edges),
    )


def _columns(did: Array, knots: Array) -> Array:
    """Return f64 [steps, n]: 1, how much of each stretch between knots was run, and the lines."""
    tokens = did[:, :1]
    stretches = np.clip((tokens - knots[:-1]) / np.diff(knots), 0.0, 1.0)
    return np.concatenate([np.ones_like(tokens), stretches, did[:, 1:]], axis=1)


def _robust(x: Array, y: Array) -> tuple[Array, float]:
    """Return weights of 0 or more with x @ weights near y, and the usual relative error."""
    trust, n = np.ones(len(y)), x.shape[1]
    ridge = _RIDGE * np.sqrt(len(y)) / y.mean() * np.eye(n)
    for _ in range(_ROUNDS):
        scale = trust / y
        rows = np.concatenate([x * scale[:, None], ridge])
        weights, _left = nnls(rows, np.concatenate([trust, np.zeros(n)]))
        miss = np.abs(x @ weights / y - 1.0)
        spread = 1.5 * float(np.median(miss))
        trust = np.sqrt(np.minimum(1.0, 2.0 * spread / np.maximum(miss, 1e-9)))
    return weights, spread
