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
    asking = asking_of(requests, places)
    if not asking:
        return {}
    counts = [int(accepted[i]) + 1 for i in asking]
    nodes = np.arange(tokens.shape[1]) if path is None else np.insert(path + 1, 0, 0, axis=1)
    nodes = np.broadcast_to(nodes, tokens.shape)
    where = np.concatenate(
        [places.starts[i] + nodes[i, :n] for i, n in zip(asking, counts, strict=True)]
    )
    drawn = np.concatenate([tokens[i, :n] for i, n in zip(asking, counts, strict=True)])
    device = logits.device
    at, token = torch.from_numpy(where).to(device), torch.from_numpy(drawn).to(device)
    own, ids, values = told(logits[at], token, most_of(requests, places, asking))
    rows = places.rows[asking].tolist()
    return collected(
        requests, rows, counts, drawn.tolist(), own.tolist(), ids.tolist(), values.tolist()
    )


def asking_of(requests: Sequence[Request], places: Places) -> list[int]:
    """Return which of the rows that emit have asked for logprobs."""
    return [i for i, r in enumerate(places.rows) if requests[r].sampling.logprobs is not None]


def most_of(requests: Sequence[Request], places: Places, asking: Sequence[int]) -> int:
    """Return how many of the likeliest tokens any of the asking rows wants to know."""
    return max(requests[places.rows[i]].sampling.logprobs or 0 for i in asking)


def told(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return of logits [n, vocab] the logprobs f32 [n] of tokens i64 [n], and the likeliest `most`
    tokens, i64 [n, most], with theirs.
    """  # noqa: D205
    law = torch.log_softmax(logits.float(), -1)
    top = law.topk(min(most, law.shape[-1]))
    return law.gather(1, tokens[:, None])[:, 0], top.indices, top.values


def collected(
    requests: Sequence[Request],
    rows: Sequence[int],
    counts: Sequence[int],
    drawn: list[int],
    own: list[float],
    ids: list[list[int]],
    values: list[list[float]],
) -> dict[int, list[TokenLogprob]]:
    """Return logprobs by batch row of `rows`, of which each has counts[i] of what follows, flat."""
    best = [list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
    found: dict[int, list[TokenLogprob]] = {}
    at = 0
    for row, n in zip(rows, counts, strict=True):
        wanted = requests[row].sampling.logprobs or 0
        found[row] = [
            TokenLogprob(drawn[j], own[j], tuple(best[j][:wanted])) for j in range(at, at + n)
        ]
        at += n
    return found
