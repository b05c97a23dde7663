"""One k for the whole batch, as full CUDA graphs want it."""

from __future__ import annotations

import numpy as np

from parlay.engine.plugins.fitting import draft_all
from parlay.policies.types import BatchView, Fitted


def uniform(fit: Fitted, view: BatchView, column: int, lengths: tuple[int, ...] = ()) -> Fitted:
    """Return a fit in which every row drafts the same k, with about as many tokens in all.

    Rows that may not draft with `column`, or not so much, keep to what they may. lengths: the k
    that graphs were captured for, of which the largest that is not too much is taken; empty: any.
    """
    may = view.allows(column) & (view.prefill_tokens == 0)
    k = int(np.floor(fit.k[may].sum() / max(int(may.sum()), 1) + 0.5))
    if lengths:
        k = max((n for n in lengths if n <= k), default=0)
    draft_all(fit, np.where(may, np.minimum(k, view.max_k), 0).astype(np.int32), column)
    return fit
