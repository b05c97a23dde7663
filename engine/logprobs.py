"""Log-probabilities of committed tokens, for the rows of a pass whose requests ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parlay.engine.request import Request, TokenLogprob
from parlay.engine.verify import Places
from parlay.policies.types import Array


def logprobs_of(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    accepted: Array,
    tokens: Array,
    path: Array | None = None,
) -> dict[int, list[TokenLogprob]]:
    """Return the logprobs of each asking row's accepted tokens and the one after, by batch row.

    They are the model's own, before temperature and filters. logits [places, vocab]; accepted
    i32 [rows] and tokens i64 [rows, K + 1] are those of `places.rows`, requests the batch's. path
    i64 [rows, K]: the accepted nodes where the drafts are trees. Nothing is computed for others.
    """
    asking = [i for i, r in enumerate(places.rows) if requests[r].sampling.logprobs is not None]
    if not asking:
        return {}
    counts = [int(accepted[i]) + 1 for i in asking]
    nodes = np.arange(tokens.shape[1]) if path is None else np.insert(path + 1, 0, 0, axis=1)
    nodes = np.broadcast_to(nodes, tokens.shape)
    where = np.concatenate(
        [places.starts[i] + nodes[i, :n] for i, n in zip(asking, counts, strict=True)]
    )
    drawn = np.concatenate([tokens[i, :n] for i, n in zip(asking, counts, strict=True)])
    law = torch.log_softmax(logits[torch.from_numpy(where).to(logits.device)].float(), -1)
    own = law.gather(1, torch.from_numpy(drawn).to(law.device)[:, None])[:, 0].tolist()
    most = max(requests[places.rows[i]].sampling.logprobs or 0 for i in asking)
    top = law.topk(min(most, law.shape[-1]))
    best = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    found: dict[int, list[TokenLogprob]] = {}
    at = 0
    for i, n in zip(asking, counts, strict=True):
        row = int(places.rows[i])
        wanted = requests[row].sampling.logprobs or 0
        found[row] = [
            TokenLogprob(int(drawn[j]), own[j], tuple(best[j][:wanted])) for j in range(at, at + n)
        ]
        at += n
    return found
