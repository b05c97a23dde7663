"""What a step of the fast loop takes, and by how much each row's draft made it longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from parlay.policies.cost import behind
from parlay.policies.features import DEPTH
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, PROPOSERS, Array

if TYPE_CHECKING:
    from parlay.sim.fast import FastLoop

_USUAL_WEIGHT = 0.1


@dataclass(slots=True)
class Drafted:
    """What became of drafts i64 [rows]: passes run, tokens kept, and of those verified.

    Passes are more than kept tokens where a stop rule ended the draft at one that it then left out.
    """

    passes: Array
    kept: Array
    verified: Array


@dataclass(slots=True)
class Stepped:
    """What a step did: accepted, emitted i64 and caused_ms [rows]; the rest by batch.

    caused_ms: by how much longer the step took because the row drafted. tokens: emitted; draft_ms
    [PROPOSERS, batches]; padded: tokens that the verify pass really ran; net_ms: step_ms but for
    what the prompts in it would have taken without drafts.
    """

    accepted: Array
    emitted: Array
    caused_ms: Array
    tokens: Array
    draft_ms: Array
    verify_ms: Array
    padded: Array
    net_ms: Array
    step_ms: Array


def priced(loop: FastLoop, who: Array, drafted: Drafted, accepted: Array) -> Stepped:
    """Return what a step of `loop` did, who [rows] being NONE where nothing was asked."""
    costs, batch, every, k = loop.costs, loop.batch, loop.every, drafted.verified
    emitted = np.where(loop.emits, accepted + 1, 0)
    tokens = loop.fed + loop.sums(k)
    attention = costs.attention(every, loop.sums(loop.emits), loop.kv_tokens)
    verify = costs.verify_ms(every, tokens, attention)
    caused = verify[batch] - costs.verify_ms(batch, tokens[batch] - k, attention)
    draft = np.zeros((PROPOSERS, len(every)))
    draft[DRAFT_MODEL], of_row = _draft_ms(loop, who, drafted.passes)
    loop.tried[DRAFT_MODEL] |= draft[DRAFT_MODEL] > 0.0
    caused += of_row
    for p, price in ((MEDUSA, costs.medusa_ms), (NGRAM, costs.ngram_ms)):
        rows = loop.sums(who == p)
        loop.tried[p] |= rows > 0
        draft[p] = price(every, rows)
        without = price(every, np.maximum(rows - 1, 0))
        caused += np.where(who == p, (draft[p] - without)[batch], 0.0)
    step_ms = verify + draft.sum(axis=0) + costs.overhead_ms
    prompts = loop.fed - loop.decoding
    loop.usual += _USUAL_WEIGHT * (tokens - prompts - loop.usual)
    with_prompts = costs.verify_ms(every, loop.fed, attention)
    plain = costs.verify_ms(every, loop.decoding, attention)
    return Stepped(
        accepted=accepted,
        emitted=emitted,
        caused_ms=caused,
        tokens=loop.sums(emitted),
        draft_ms=draft,
        verify_ms=verify,
        padded=costs.padded(every, tokens),
        net_ms=step_ms - np.where(prompts > 0, with_prompts - plain, 0.0),
        step_ms=step_ms,
    )


def _draft_ms(loop: FastLoop, who: Array, passes: Array) -> tuple[Array, Array]:
    """Return what the draft model takes, by batch, and what each row adds to it."""
    mine = np.flatnonzero(who == DRAFT_MODEL)
    batches, of_row = len(loop.kinds), np.zeros(len(who))
    if not len(mine):
        return np.zeros(batches), of_row
    batch, deep, kv = loop.batch[mine], passes[mine], loop.computed[mine]
    size = batches * (DEPTH + 1)
    depth = np.bincount(batch * (DEPTH + 1) + deep, minlength=size).reshape(batches, -1)
    rows = depth[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    owing = np.where(loop.catches_up[batch], behind(loop.lag[mine]), 0)
    kv_sum, owed = (np.bincount(batch, x, batches) for x in (kv, owing))
    owed = owed.astype(np.int64)
    took = _passes_ms(loop, loop.every, rows, kv_sum, owed)
    fewer = rows[batch] - (np.arange(DEPTH) < deep[:, None])
    without = _passes_ms(loop, batch, fewer, kv_sum[batch] - kv, owed[batch] - owing)
    of_row[mine] = took[batch] - without
    return took, of_row


def _passes_ms(loop: FastLoop, batch: Array, rows: Array, kv_tokens: Array, owed: Array) -> Array:
    """Return the time [n] of passes over rows [n, DEPTH]; the first reads what is owed."""
    kv_of_row = (kv_tokens / np.maximum(rows[:, 0], 1))[:, None]
    first = np.where(np.arange(DEPTH) == 0, owed[:, None], 0)
    took = loop.costs.draft_pass_ms(batch[:, None], rows, kv_of_row, first)
    # One after the other, as a cost model adds them up: to the last digit the same.
    total: Array = took.cumsum(axis=1)[:, -1]
    return total
