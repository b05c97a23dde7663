"""Draft-model proposer: a small Llama with its own paged cache guesses k tokens, one pass a token.

Its first pass reads whatever it has not read yet (one token when it drafted the step before, more
after idleness); each further pass is over the rows that go that deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.attention.paged import PagedKV, plan_ragged
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.backend import Batch
from parlay.engine.models import Llama
from parlay.engine.request import Request, SampleMode
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.verify import DraftLaw, coupled
from parlay.policies.types import Array, StopKind, StopRule


@dataclass(slots=True)
class DraftRun:
    """What the draft model guessed for its rows: count i32 [rows], tokens i64 and confidences f32
    [rows, K], passes, and the law of sampled drafts.
    """  # noqa: D205

    count: Array
    tokens: Array
    confidences: Array
    passes: int
    law: DraftLaw


class DraftModelProposer:
    """A draft model on its own device in its own dtype, with the target's tokenizer.

    ids i64 [head rows]: the target's token id of each row of the trimmed head.
    """

    def __init__(self, model: Llama, cache: PagedKV, ids: Tensor, engine_seed: int) -> None:
        self.model, self.cache, self.ids, self.engine_seed = model, cache, ids, engine_seed
        self.attention = SdpaAttention(cache, model.config.heads)
        self._host_ids = ids.cpu().numpy()

    def propose(self, batch: Batch, rows: Array, k: Array, stop: StopRule) -> DraftRun:
        """Draft up to k[row] tokens for each batch row of `rows`."""
        deepest = np.argsort(-k[rows], kind="stable")
        order = rows[deepest]
        requests = [batch.requests[r] for r in order]
        depth = int(k[order[0]])
        guess = np.full((len(order), depth), -1, np.int64)
        confidence = np.full((len(order), depth), np.nan, np.float32)
        law = DraftLaw(
            {int(r): i for i, r in enumerate(order) if _is_sampled(batch.requests[r])}, [], self.ids
        )
        reach, alive = np.ones(len(order)), np.arange(len(order))
        passes = 0
        for place in range(depth):
            alive = alive[k[order[alive]] > place]
            if not len(alive):
                break
            logits = self._read(batch, [requests[i] for i in alive], guess[alive, :place])
            chosen, peak, entropy = self._choose(logits, requests, alive, place, law)
            passes += 1
            reach[alive] *= peak
            go = _keeps_drafting(stop, reach[alive], entropy, place)
            alive, chosen, peak = alive[go], chosen[go], peak[go]
            guess[alive, place], confidence[alive, place] = chosen, peak
            if stop.kind is StopKind.PROBABILITY:
                # The token that falls below the threshold is kept; drafting ends behind it.
                alive = alive[peak >= stop.threshold]
        back = np.argsort(deepest)
        guess, confidence = guess[back], confidence[back]
        return DraftRun((guess >= 0).sum(1).astype(np.int32), guess, confidence, passes, law)

    def _read(self, batch: Batch, requests: Sequence[Request], guesses: Array) -> Tensor:
        """Return logits [rows, head rows] after each request's tokens and guesses; one pass."""
        place = guesses.shape[1]
        if place:
            starts = [len(r.tokens) + place - 1 for r in requests]
            fed: list[list[int]] = [[int(t)] for t in guesses[:, -1]]
        else:
            starts = [r.draft_computed for r in requests]
            fed = [r.tokens[r.draft_computed :] for r in requests]
        lengths = [len(f) for f in fed]
        c = self.model.config
        tables = [batch.draft.tables[r.request_id] for r in requests]
        ragged = plan_ragged(self.cache, tables, starts, lengths, c.heads // c.kv_heads)
        ids = torch.tensor([t for f in fed for t in f], device=self.model.device)
        hidden = self.model.hidden(ids, ragged, self.attention)
        last = torch.tensor(np.cumsum(lengths) - 1, device=self.model.device)
        return self.model.logits(hidden if max(lengths) == 1 else hidden[last])

    def _choose(
        self, logits: Tensor, requests: Sequence[Request], alive: Array, place: int, law: DraftLaw
    ) -> tuple[Array, Array, Array]:
        """Return each row's token id, its law's largest probability and its entropy (nats)."""
        p = torch.softmax(logits.float(), -1)
        peak, best = p.max(-1)
        entropy = torch.special.entr(p).sum(-1)
        choice = best.cpu().numpy()
        sampled = [
            i
            for i in range(len(alive))
            if requests[alive[i]].sampling.mode is not SampleMode.GREEDY
        ]
        laws = (
            torch.zeros(len(requests), p.shape[-1], dtype=torch.float64, device=p.device)
            if law.row
            else None
        )
        for i in sampled:
            request = requests[alive[i]]
            if request.sampling.mode is SampleMode.COUPLED:
                choice[i] = int(
                    coupled(logits[i : i + 1], request, place, self.ids, self.engine_seed)[0]
                )
                continue
            q = probabilities(logits[i : i + 1], [request.sampling])
            key = draw_key(
                request_key(request, self.engine_seed), request.output_tokens + place, Purpose.DRAFT
            )
            choice[i] = int(race(q, [key], self.ids)[0])
            assert laws is not None
            laws[alive[i]] = q[0]
        if laws is not None:
            law.law.append(laws)
        return self._host_ids[choice], peak.cpu().numpy(), entropy.cpu().numpy()


def _is_sampled(request: Request) -> bool:
    return request.sampling.mode is SampleMode.REJECTION


def _keeps_drafting(stop: StopRule, reach: Array, entropy: Array, place: int) -> Array:
    """Return bool [rows]: whether to draft this place, judged before its token is drawn."""
    if place == 0:
        return np.ones(len(reach), bool)
    if stop.kind is StopKind.SURVIVAL:
        return reach >= stop.threshold
    if stop.kind is StopKind.ENTROPY:
        return np.sqrt(ENTROPY_SCALE * entropy) <= stop.threshold
    return np.ones(len(reach), bool)


ENTROPY_SCALE = 0.15
"""The c of sqrt(c H), SVIP's bound on acceptance from the drafter's entropy (Zhang et al. 2024)."""
