"""What the target says of a step's drafts: begun where the logits lie, read by the host later.

`judge_on_device` only enqueues work, and what it returns waits for it: that is a step's one look at
a GPU. `judge` is for logits on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from parlay.engine.device_trees import walk_trees
from parlay.engine.device_verify import accept_chains
from parlay.engine.logprobs import asking_of, collected, logprobs_of, most_of, told
from parlay.engine.request import Request, TokenLogprob
from parlay.engine.sampling import laws, shaping
from parlay.engine.transfer import Reading, Upload, upload
from parlay.engine.tree import Trees
from parlay.engine.tree_verify import accept_trees
from parlay.engine.verify import DraftLaw, Places, accept, overlaps
from parlay.policies.types import Array


@dataclass(slots=True)
class Judged:
    """accepted [rows] and tokens [rows, K + 1] as of `verify.accept`, path i64 [rows, D] where the
    drafts are trees, logprobs and overlaps by batch row. told: what was to be read besides.
    """  # noqa: D205

    accepted: Array
    tokens: Array
    path: Array | None = None
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    overlaps: dict[int, float] = field(default_factory=dict)
    told: list[Array] = field(default_factory=list)


Verdict = Callable[[], Judged]
"""Waits for what was begun."""


def judge(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    trees: Trees | None,
    law: DraftLaw | None,
    engine_seed: int,
    choice: Tensor | None = None,
    besides: Sequence[Tensor] = (),
) -> Verdict:
    """Judge the drafts of a step on a CPU, at once; call what is returned for the verdict.

    logits [places, vocab]; requests, trees and law are the batch's. choice i64 [places]: the first
    of the largest logits, where they are known; here they are sought anew. besides: what else is to
    be read; on a CPU all has been.
    """
    assert not besides, "who judges on a CPU has read what was drafted"
    path = None
    if trees is None:
        accepted, tokens = accept(logits, requests, places, law, engine_seed)
    else:
        walked = accept_trees(logits, requests, places.rows, trees, law, engine_seed)
        accepted, tokens, path = walked.accepted, walked.tokens, walked.path
    judged = Judged(
        accepted, tokens, path,
        logprobs_of(logits, requests, places, accepted, tokens, path),
        overlaps(logits, requests, places, law),
    )  # fmt: skip
    return lambda: judged


def judge_on_device(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    trees: Trees | None,
    law: DraftLaw | None,
    engine_seed: int,
    choice: Tensor | None = None,
    besides: Sequence[Tensor] = (),
) -> Verdict:
    """Do as `judge`, wherever the logits lie, without a look at a value before the verdict."""
    rows, path = places.rows, None
    if trees is None:
        held, tokens = accept_chains(logits, requests, places, law, engine_seed, choice)
    else:
        held, tokens, path = walk_trees(logits, requests, rows, trees, law, engine_seed, choice)
    found = [held, tokens] if path is None else [held, tokens, path]
    asking = asking_of(requests, places)
    if asking:
        found += _told(logits, requests, places, asking, held, tokens, path)
    watched = sorted({} if law is None else law.watched)
    if law is not None and watched:
        found.append(_overlaps(logits, requests, places, law, watched))
    reading = Reading([*found, *besides])

    def verdict() -> Judged:
        parts = iter(reading.arrays())
        accepted, tokens = next(parts), next(parts)
        path = None if trees is None else next(parts)
        judged = Judged(accepted.astype(np.int32), tokens, path)
        if asking:
            counts = accepted[asking] + 1
            keep = np.arange(tokens.shape[1]) < counts[:, None]
            told_of = [next(parts).reshape(*keep.shape, *tail)[keep].tolist()
                       for tail in ((), (-1,), (-1,))]  # fmt: skip
            of = rows[asking].tolist()
            drawn = tokens[asking][keep].tolist()
            judged.logprobs = collected(requests, of, counts.tolist(), drawn, *told_of)
        if watched:
            judged.overlaps = dict(zip(watched, next(parts).tolist(), strict=True))
        judged.told = list(parts)
        return judged

    return verdict


def _told(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    asking: list[int],
    held: Tensor,
    tokens: Tensor,
    path: Tensor | None,
) -> list[Tensor]:
    """Return what `logprobs.told` tells of each asking row's places, flat; of some in vain."""
    mine, start = upload(logits.device, np.asarray(asking), places.starts[asking])
    if path is None:
        step = torch.arange(tokens.shape[1], device=logits.device)
        node = torch.minimum(step, held[mine, None])
    else:
        node = torch.nn.functional.pad(path[mine] + 1, (1, 0))
    where, drawn = (start[:, None] + node).flatten(), tokens[mine].clamp_min(0).flatten()
    return list(told(logits[where], drawn, most_of(requests, places, asking)))


def _overlaps(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    law: DraftLaw,
    watched: Sequence[int],
) -> Tensor:
    """Return f64 [watched]: sum min(p, q) at the first place of each watched batch row."""
    first = dict(zip(places.rows.tolist(), places.starts.tolist(), strict=False))
    load = Upload(logits.device)
    where = load.add(np.asarray([first[row] for row in watched], np.int64))
    params = [requests[row].sampling for row in watched]
    shape = [load.add(a) for a in shaping(params, logits.shape[-1])]
    load.send()
    p = laws(logits[where.tensor], *(s.tensor for s in shape))
    q = torch.stack([law.watched[row] for row in watched]).to(p.device)
    return torch.minimum(p[:, law.ids.to(p.device)], q).sum(1)
