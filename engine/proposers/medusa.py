"""Medusa proposer: heads guess a chain of tokens from the target's state of its last position.

That is the state from which the target made the row's last token; the target's runner has kept it,
so that there is nothing to catch up with. Guesses are point masses: rejection sampling needs no law
of theirs, and whether a place is guessed depends on no draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Batch
from parlay.engine.branches import Branch
from parlay.engine.medusa_heads import Heads
from parlay.engine.proposers.draft_model import estimate, keeps_drafting, likeliest
from parlay.engine.proposers.siblings import Siblings
from parlay.engine.request import Request, SampleMode
from parlay.engine.runner import Runner
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.spans import Spans
from parlay.policies.types import Array, Plan, Proposer, StopKind, StopRule


@dataclass(slots=True)
class HeadsRun:
    """What the heads guessed for their rows: count i32 [rows], tokens i64 [rows, K], -1 beyond
    count, and confidences f32 [rows, K], each place's largest probability, nan where no head ran;
    branches: what may stand beside the tokens of batch rows.
    """  # noqa: D205

    count: Array
    tokens: Array
    confidences: Array
    branches: dict[int, list[Branch]]

    def watch(self, rows: Array, seen: Array) -> dict[int, list[int]]:
        """Return the guesses of batch rows rows[seen], by row; nothing verifies them."""
        return {
            int(rows[i]): self.tokens[i, : self.count[i]].tolist()
            for i in np.flatnonzero(seen & (self.count > 0))
        }

    def only(self, rows: Array) -> HeadsRun:
        """Return the run of some rows, bool; branches are everybody's."""
        return replace(
            self,
            count=self.count[rows],
            tokens=self.tokens[rows],
            confidences=self.confidences[rows],
        )


class MedusaProposer:
    """Heads on the target's device; target: keeps the states of the layers that they read."""

    def __init__(self, heads: Heads, engine_seed: int, target: Runner) -> None:
        self.heads, self.engine_seed, self.target = heads, engine_seed, target
        self._host_ids = heads.ids.cpu().numpy()

    def propose(
        self, batch: Batch, rows: Array, k: Array, plan: Plan | None, beside: int = 0
    ) -> HeadsRun:
        """Guess up to k[row] tokens, at most `heads.heads`, for each batch row of `rows`.

        A row of whose tokens the target has more to read than the last gets none. beside: how many
        next-best tokens of each place become branches.
        """
        requests = [batch.requests[r] for r in rows]
        wanted = np.minimum(k[rows], self.heads.heads) * [is_read(r) for r in requests]
        depth = int(wanted.max(initial=0))
        guess = np.full((len(rows), depth), -1, np.int64)
        confidence = np.full((len(rows), depth), np.nan, np.float32)
        stop = plan.stop_rule if plan else StopRule()
        # What is only observed is observed to its end: where heads are sure they hold more often.
        watched = batch.heads_k[rows] > 0 if len(batch.heads_k) else np.zeros(len(rows), bool)
        siblings = Siblings(beside, rows, self._host_ids)
        alive = np.flatnonzero(wanted)
        reach = np.ones(len(alive))
        if depth:
            x, token = self._begin(batch, [requests[i] for i in alive])
        for place in range(depth):
            x, logits = self.heads.step(place, x, token)
            chosen, peak, own = self._choose(logits, [requests[i] for i in alive], place)
            if beside:
                siblings.see(torch.softmax(logits.float(), -1), chosen, alive, place)
            confidence[alive, place] = peak
            reach = reach * estimate(plan, Proposer.MEDUSA, place, peak)
            go = keeps_drafting(stop, reach, logits, place) | watched[alive]
            guess[alive[go], place] = self._host_ids[chosen[go]]
            if stop.kind is StopKind.PROBABILITY:
                # The token that falls below the threshold is kept; guessing ends behind it.
                go &= (own >= stop.threshold) | watched[alive]
            go &= wanted[alive] > place + 1
            if not go.any():
                break
            alive, reach = alive[go], reach[go]
            x = x[torch.from_numpy(np.flatnonzero(go)).to(x.device)]
            token = torch.from_numpy(guess[alive, place]).to(x.device)
        count = (guess >= 0).sum(1).astype(np.int32)
        return HeadsRun(count, guess, confidence, siblings.branches)

    def _begin(self, batch: Batch, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Return what the heads begin with for each request, and its last token."""
        known = [r.computed for r in requests]
        tables = [batch.target.tables[r.request_id] for r in requests]
        spans = Spans(tables, known, [1] * len(requests))
        device = self.heads.ids.device
        states = self.target.states_before(spans, known, self.heads.state_layers).to(device)
        roots = torch.tensor([r.tokens[-1] for r in requests], device=device)
        return self.heads.begin(states), roots

    def _choose(
        self, logits: Tensor, requests: Sequence[Request], place: int
    ) -> tuple[Array, Array, Array]:
        """Return the rows of the logits chosen, the laws' largest probability, and the choice's.

        The likeliest, but for a coupled request: there what the target's own noise makes of the
        heads' law.
        """
        p = torch.softmax(logits.float(), -1)
        choice, peak = likeliest(p)
        drawn = [i for i, r in enumerate(requests) if r.sampling.mode is SampleMode.COUPLED]
        if not drawn:
            return choice, peak, peak
        q = probabilities(logits[drawn], [requests[i].sampling for i in drawn])
        keys = [self._key(requests[i], place) for i in drawn]
        choice[drawn] = race(q, keys, self.heads.ids).cpu().numpy()
        own = p[torch.arange(len(requests)), torch.from_numpy(choice).to(p.device)]
        return choice, peak, own.cpu().numpy()

    def _key(self, request: Request, place: int) -> int:
        """Return the key of the target's own draw at a place."""
        position = request.output_tokens + place
        return draw_key(request_key(request, self.engine_seed), position, Purpose.COUPLED)


def is_read(request: Request) -> bool:
    """Say whether the target has read all of a request's tokens but the last."""
    return request.pending == 1
