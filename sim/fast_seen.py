"""What features are made of, in the fast loop: as a served policy would see requests and prices."""

from __future__ import annotations

import numpy as np

from parlay.policies.cost import KV_UNIT, TOKENS_UNIT, StepTime
from parlay.policies.features import WIDTHS, Prices, Rows
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, Array
from parlay.policies.watched import UNSEEN_SHARE
from parlay.sim.fast import FastLoop

_COLD = StepTime()
_ENDS = np.array([1.0, TOKENS_UNIT])
_ONE_MS, _UNIT_MS = _COLD.verify_ms(_ENDS, 0.0).tolist()
_TOKEN = (_UNIT_MS - _ONE_MS) / (1.0 - 1.0 / TOKENS_UNIT)
_FIXED = _ONE_MS - _TOKEN / TOKENS_UNIT
_KV = float(_COLD.verify_ms(_ENDS, KV_UNIT)[0]) - _ONE_MS
UNSEEN_PASS = float(_COLD.draft.shape[0])


def rows_of(loop: FastLoop, tpot_target_ms: float = float("nan")) -> Rows:
    """Return the requests as features see them."""
    n = len(loop.batch)
    return Rows(
        row=np.arange(n),
        batch=loop.batch,
        task=loop.batch * loop.task_count + loop.task,
        match_tokens=loop.match,
        output_tokens=loop.output,
        recent_accept=loop.recent,
        draft_kv_lag=np.where(loop.catches_up[loop.batch], loop.lag, 1),
        temperature=np.zeros(n),
        tpot_target_ms=np.full(n, tpot_target_ms),
    )


def prices_of(loop: FastLoop) -> Prices:
    """Return the batches as features see them.

    As when served, what a proposer takes is a guess until it was used, and where `vary` is set
    the price of tokens leans as far as it may on the line that step times begin with: a policy
    only knows steps like those that it made.
    """
    costs, every, kv = loop.costs, loop.every, loop.kv_tokens
    rows = np.maximum(loop.decoding, 1)
    attention = costs.attention(every, rows, kv)

    def step_ms(tokens: Array) -> Array:
        took: Array = costs.verify_ms(every, tokens, attention) + costs.overhead_ms
        return took

    now = np.maximum(np.rint(loop.usual), 1).astype(np.int64)
    unit_ms = step_ms(now) / _line(now, kv)
    verify = np.stack(
        [
            step_ms(rows * w) ** (1.0 - loop.blind) * (unit_ms * _line(rows * w, kv)) ** loop.blind
            for w in WIDTHS
        ]
    )
    pass_ms = costs.draft_pass_ms(every, rows, kv / rows)
    read = costs.draft_pass_ms(every, rows, kv / rows, 512)
    known = loop.tried
    return Prices(
        decoding=rows,
        kv_tokens=kv,
        verify_ms=np.maximum.accumulate(verify),
        pass_ms=np.where(known[DRAFT_MODEL], pass_ms, UNSEEN_PASS * unit_ms),
        medusa_ms=np.where(
            known[MEDUSA], costs.medusa_ms(every, rows), UNSEEN_SHARE[MEDUSA] * verify[0]
        ),
        ngram_ms=np.where(
            known[NGRAM], costs.ngram_ms(every, rows), UNSEEN_SHARE[NGRAM] * verify[0]
        ),
        catch_up_ms=np.where(loop.catches_up, (read - pass_ms) / 512, 0.0),
        prefill_share=(loop.fed - loop.decoding) / np.maximum(loop.fed, 1),
        slack=np.minimum((costs.padded(every, loop.fed) - loop.fed) / rows, 4.0),
    )


def features_of(loop: FastLoop, tpot_target_ms: float = float("nan")) -> Array:
    """Return f32 [rows, features], raw."""
    return loop.tracker.columns(rows_of(loop, tpot_target_ms), prices_of(loop))


def _line(tokens: Array, kv_tokens: Array) -> Array:
    """Return a step's time as it is thought to be before any was seen, against one token's."""
    line: Array = _FIXED + _TOKEN * tokens / TOKENS_UNIT + _KV * kv_tokens / KV_UNIT
    return line
