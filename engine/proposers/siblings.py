"""A drafter's next-best tokens at each place of its chains, as branches of one token."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from parlay.engine.branches import Branch
from parlay.policies.types import Array


class Siblings:
    """Collects up to `count` tokens beside each place's own.

    rows i64: the batch row of each draft; ids i64: the token of each entry of a law. A draft that
    was sampled to be accepted by rejection may have none (`tree_verify`).
    """

    def __init__(self, count: int, rows: Array, ids: Array) -> None:
        self.count, self.rows, self.ids = count, rows, ids
        self.branches: dict[int, list[Branch]] = {}

    def see(self, p: Tensor, chosen: Array, drafts: Array, place: int) -> None:
        """Take the laws p f32 [n, ids] of a place, where ids[chosen[i]] is the token of drafts[i].

        What is left of a law without the chain's token is each other one's share of it.
        """
        law, at = p.cpu().numpy().copy(), np.arange(len(chosen))
        left = np.maximum(1.0 - law[at, chosen], 1e-9)
        law[at, chosen] = 0.0
        rows = self.rows[drafts].tolist()
        for _ in range(min(self.count, law.shape[1] - 1)):
            # A tenth of the time of torch's topk.
            best = law.argmax(-1)
            shares = (law[at, best] / left).tolist()
            law[at, best] = 0.0
            for row, token, share in zip(rows, self.ids[best].tolist(), shares, strict=True):
                self.branches.setdefault(row, []).append(Branch(place, [token], share))
