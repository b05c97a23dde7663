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
from parlay.engine.graph_heads import HeadGraphs
from parlay.engine.medusa_heads import Heads
from parlay.engine.proposers.confidence import estimate, keeps_drafting, likeliest
from parlay.engine.proposers.device_draft import Guessed, Job, Said, guess_on_device
from parlay.engine.proposers.siblings import Siblings
from parlay.engine.proposers.unread import Unread
from parlay.engine.request import Request, SampleMode
from parlay.engine.runner import Runner
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.spans import Spans
from parlay.engine.transfer import upload
from parlay.policies.types import Array, Plan, Proposer, StopKind, StopRule


@dataclass(slots=True)
class HeadsRun:
    """What the heads guessed for their rows: count i32 [rows], tokens i64 [rows, K], -1 beyond
    count, and confidences f32 [rows, K], each place's largest probability, nan where no head ran;
    branches: what may stand beside the tokens of batch rows; unread: see `Guessed`.
    """  # noqa: D205

    count: Array
    tokens: Array
    confidences: Array
    branches: dict[int, list[Branch]]
    unread: Unread | None = None

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
            unread=None if self.unread is None else self.unread.only(rows),
        )


class MedusaProposer:
    """Heads on the target's device; target: keeps the states of the layers that they read."""

    def __init__(self, heads: Heads, engine_seed: int, target: Runner) -> None:
        self.heads, self.engine_seed, self.target = heads, engine_seed, target
        self._host_ids = heads.ids.cpu().numpy()
        self.on_device = heads.ids.device.type != "cpu"
        self.graphs: HeadGraphs | None = None

    def propose(
        self,
        batch: Batch,
        rows: Array,
        k: Array,
        plan: Plan | None,
        beside: int = 0,
        read: bool = True,
    ) -> HeadsRun:
        """Guess up to k[row] tokens, at most `heads.heads`, for each batch row of `rows`.

        A row of whose tokens the target has more to read than the last gets none. beside: how many
        next-best tokens of each place become branches. read False: what is guessed may stay unread.
        """
        requests = [batch.requests[r] for r in rows]
        wanted = np.minimum(k[rows], self.heads.heads) * [is_read(r) for r in requests]
        # What is only observed is observed to its end: where heads are sure they hold more often.
        watched = batch.heads_k[rows] > 0 if len(batch.heads_k) else np.zeros(len(rows), bool)
        if not wanted.any():
            made = Guessed(np.zeros((len(rows), 0), np.int64), np.zeros((len(rows), 0), np.float32))
        elif self.on_device:
            made = self._guess_on_device(batch, requests, rows, wanted, watched, plan, beside, read)
        else:
            siblings = Siblings(beside, rows, self._host_ids)
            made = self._guess(batch, requests, wanted, watched, plan, siblings)
        count = (made.tokens >= 0).sum(1).astype(np.int32)
        return HeadsRun(count, made.tokens, made.confidences, made.branches, made.unread)

    def _guess(
        self,
        batch: Batch,
        requests: Sequence[Request],
        wanted: Array,
        watched: Array,
        plan: Plan | None,
        siblings: Siblings,
    ) -> Guessed:
        """Guess a place at a time."""
        shape = len(requests), int(wanted.max())
        made = Guessed(np.full(shape, -1, np.int64), np.full(shape, np.nan, np.float32))
        guess, stop = made.tokens, plan.stop_rule if plan else StopRule()
        alive = np.flatnonzero(wanted)
        reach = np.ones(len(alive))
        x, token = self.begin(batch, [requests[i] for i in alive.tolist()])
        for place in range(shape[1]):
            x, logits = self.heads.step(place, x, token)
            chosen, peak, own = self._choose(logits, [requests[i] for i in alive.tolist()], place)
            if siblings.count:
                siblings.see(torch.softmax(logits.float(), -1), chosen, alive, place)
            made.confidences[alive, place] = peak
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
            x = x[torch.from_numpy(np.flatnonzero(go))]
            token = torch.from_numpy(guess[alive, place])
        made.branches = siblings.branches
        return made

    def _guess_on_device(
        self,
        batch: Batch,
        requests: Sequence[Request],
        rows: Array,
        wanted: Array,
        watched: Array,
        plan: Plan | None,
        beside: int,
        read: bool,
    ) -> Guessed:
        """Guess with all that is guessed staying on the device until the end."""
        drawn = np.asarray([r.sampling.mode is SampleMode.COUPLED for r in requests])
        depth = range(int(wanted.max()))
        keys = np.asarray([[self._key(r, place) for place in depth] for r in requests], np.uint64)
        every = np.ones(len(rows), bool)
        job = Job(
            Proposer.MEDUSA, requests, rows, self.heads.ids, wanted, watched, drawn, keys, every,
            beside, plan, read,
        )  # fmt: skip
        return guess_on_device(_Stepping(self, batch, requests), job, keep_laws=False)

    def begin(self, batch: Batch, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Return what the heads begin with for each request, and its last token."""
        known = [r.computed for r in requests]
        tables = [batch.target.tables[r.request_id] for r in requests]
        spans = Spans(tables, known, [1] * len(requests))
        device = self.heads.ids.device
        states = self.target.states_before(spans, known, self.heads.state_layers).to(device)
        (roots,) = upload(device, np.asarray([r.tokens[-1] for r in requests], np.int64))
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


class _Stepping:
    """Runs heads on rows whose tokens the host does not read, by graphs where there are some."""

    def __init__(self, proposer: MedusaProposer, batch: Batch, requests: Sequence[Request]) -> None:
        self.proposer, self.batch, self.requests = proposer, batch, requests
        self.x = proposer.heads.ids

    def first(self, alive: Array) -> Said:
        """Run the first head; see `Drafter.first`."""
        self.x, roots = self.proposer.begin(self.batch, [self.requests[i] for i in alive.tolist()])
        return self._step(0, roots)

    def deeper(self, alive: Array, kept: Tensor | None, tokens: Tensor, place: int) -> Said:
        """Run one head more; see `Drafter.deeper`."""
        self.x = self.x if kept is None else self.x[kept]
        return self._step(place + 1, tokens)

    def _step(self, place: int, tokens: Tensor) -> Said:
        graphs = self.proposer.graphs
        made = None if graphs is None else graphs.run(place, self.x, tokens)
        if made is None:
            self.x, logits = self.proposer.heads.step(place, self.x, tokens)
            return Said(logits)
        self.x, logits, *after = made
        return Said(logits, tuple(after))


def is_read(request: Request) -> bool:
    """Say whether the target has read all of a request's tokens but the last."""
    return request.pending == 1
