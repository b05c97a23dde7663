"""Draft-model proposer: a small Llama with its own paged cache guesses k tokens, one pass a token.

Its first pass reads what it has not read yet (a few tokens when it drafted the step before, more
after idleness, of which a step reads only so many); each further pass is over the rows that go that
deep. A draft with state_layers reads each token beside the target's states of the token before. Its
own guesses have none yet, so those that are accepted are read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Batch
from parlay.engine.landed import Landed
from parlay.engine.proposers.confidence import estimate, keeps_drafting, likeliest
from parlay.engine.proposers.device_draft import Guessed, Job, Said, guess_on_device
from parlay.engine.proposers.draft_run import DraftRun, Work
from parlay.engine.proposers.onward import Onward, onward
from parlay.engine.proposers.siblings import Siblings
from parlay.engine.request import Request, SampleMode
from parlay.engine.runner import Runner, flat
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.spans import Spans
from parlay.engine.verify import DraftLaw
from parlay.policies.types import Array, Plan, Proposer, StopKind, StopRule

STEADY_TOKENS = 17
"""A row with at most so many unread tokens has not been idle: a step can leave as many."""


class DraftModelProposer:
    """A draft model on its own device in its own dtype, with the target's tokenizer.

    ids i64 [head rows]: the target's token id of each row of the trimmed head. target: keeps the
    states of the layers that the draft reads. catch_up_tokens: how many unread tokens of rows that
    were idle it reads in one step, all rows together.
    """

    def __init__(
        self, runner: Runner, ids: Tensor, engine_seed: int, target: Runner, catch_up_tokens: int
    ) -> None:
        self.runner, self.ids, self.engine_seed, self.target = runner, ids, engine_seed, target
        self.catch_up_tokens = catch_up_tokens
        self.reads_states = bool(runner.model.config.state_layers)
        self.on_device = runner.model.device.type != "cpu"
        self.host_ids = ids.cpu().numpy()

    def propose(
        self,
        batch: Batch,
        rows: Array,
        k: Array,
        plan: Plan | None,
        beside: int = 0,
        read: bool = True,
    ) -> DraftRun:
        """Draft up to k[row] tokens for each batch row of `rows`, all of which are at least 1.

        beside: how many next-best tokens of each place of greedy rows become branches. read False:
        what is guessed may stay unread.
        """
        deepest = np.argsort(-k[rows], kind="stable")
        order = rows[deepest]
        requests = [batch.requests[r] for r in order]
        share, late = self._shares(requests)
        # What is only observed is observed to its end: where it is sure it holds more often.
        watched = batch.shadow_k[order] > 0 if len(batch.shadow_k) else np.zeros(len(order), bool)
        work = Work(
            batch, order, requests, share, np.where(late, 0, k[order]), watched, plan, beside,
            read,
        )  # fmt: skip
        drafted = {int(r): i for i, r in enumerate(order) if _is_sampled(batch.requests[r])}
        made = (self._guess_on_device if self.on_device else self._guess)(work, bool(drafted))
        back = np.argsort(deepest)
        guess, confidence, late = made.tokens[back], made.confidences[back], late[back]
        count = (guess >= 0).sum(1).astype(np.int32)
        held = np.zeros_like(count) if self.reads_states else np.maximum(count - 1, 0)
        held[late] = -1
        part = dict(zip(rows[late].tolist(), share[back][late].tolist(), strict=True))
        law = DraftLaw(drafted, made.laws, self.ids)
        unread = None if made.unread is None else made.unread.only(back)
        return DraftRun(
            count, guess, confidence, made.passes, law, held, part, made.branches, unread
        )

    def _guess(self, work: Work, keep_laws: bool) -> Guessed:
        """Draft a place at a time; keep_laws: what is drawn from is asked for."""
        depth, plan = work.depth, work.plan
        shape = len(depth), max(int(depth.max()), 1)
        made = Guessed(np.full(shape, -1, np.int64), np.full(shape, np.nan, np.float32))
        guess, confidence = made.tokens, made.confidences
        stop = plan.stop_rule if plan else StopRule()
        siblings = Siblings(work.beside, work.order, self.host_ids)
        reach, alive = np.ones(len(depth)), np.flatnonzero(depth)
        laws = made.laws if keep_laws else None
        logits = self.catch_up(work, alive)
        while True:
            place = made.passes - 1
            chosen, peak, own = self._choose(logits, work.requests, alive, place, laws, siblings)
            confidence[alive, place] = peak
            if stop.kind is not StopKind.NONE:
                reach[alive] *= estimate(plan, Proposer.DRAFT_MODEL, place, peak)
                go = keeps_drafting(stop, reach[alive], logits, place) | work.watched[alive]
                alive, chosen, own = alive[go], chosen[go], own[go]
            guess[alive, place] = chosen
            if stop.kind is StopKind.PROBABILITY:
                # The token that falls below the threshold is kept; drafting ends behind it.
                alive = alive[(own >= stop.threshold) | work.watched[alive]]
            alive = alive[depth[alive] > made.passes]
            if not len(alive):
                break
            if made.passes == 1:
                ahead = self._ahead(work, shape[1] - 1)
            logits = ahead.read(alive, guess[alive, place], place)
            made.passes += 1
        made.branches = siblings.branches
        return made

    def _guess_on_device(self, work: Work, keep_laws: bool) -> Guessed:
        """Draft with all that is guessed staying on the device until the end."""
        if not work.depth.any():
            self.catch_up(work, np.flatnonzero(work.depth))
            none = np.zeros((len(work.depth), 1))
            return Guessed(np.full_like(none, -1, np.int64), np.full_like(none, np.nan, np.float32))
        drawn = np.asarray([r.sampling.temperature > 0.0 for r in work.requests])
        keys = np.asarray(
            [
                [self._key(r, place) for place in range(int(work.depth.max()))]
                for r in work.requests
            ],
            np.uint64,
        )
        job = Job(
            Proposer.DRAFT_MODEL, work.requests, work.order, self.ids, work.depth, work.watched,
            drawn, keys, ~drawn, work.beside, work.plan, work.read,
        )  # fmt: skip
        return guess_on_device(_Ahead(self, work), job, keep_laws)

    def _shares(self, requests: Sequence[Request]) -> tuple[Array, Array]:
        """Return how many unread tokens of each request are read now, i64, and which are not all.

        Of those that were idle the ones that are least behind come first.
        """
        counts = [len(r.tokens) - r.draft_computed for r in requests]
        unread = np.asarray(counts)
        if sum(n for n in counts if n > STEADY_TOKENS) <= self.catch_up_tokens:
            return unread, np.zeros(len(requests), bool)
        idle = np.flatnonzero(unread > STEADY_TOKENS)
        share, order = unread.copy(), idle[np.argsort(unread[idle], kind="stable")]
        before = np.cumsum(unread[order]) - unread[order]
        share[order] = np.clip(self.catch_up_tokens - before, 0, unread[order])
        return share, share < unread

    def catch_up(self, work: Work, alive: Array) -> Tensor:
        """Read share[i] unread tokens of each request; return logits after those of rows alive."""
        return self.catch_up_on(work, alive).logits

    def catch_up_on(self, work: Work, alive: Array) -> Landed:
        """Do as `catch_up`, by a graph where there is one."""
        both = zip(work.requests, work.share.tolist(), strict=True)
        live = [(r, r.tokens[r.draft_computed :][:n]) for r, n in both if n]
        fed, lengths = [f for _, f in live], [len(f) for _, f in live]
        starts = [r.draft_computed - r.draft_start for r, _ in live]
        spans = Spans([work.batch.draft.tables[r.request_id] for r, _ in live], starts, lengths)
        states = None
        if self.reads_states:
            states = self._states(work.batch, [r for r, _ in live], lengths)
        last = np.cumsum(work.share)[alive] - 1
        return self.runner.forward(flat(fed), spans, states, last)

    def _ahead(self, work: Work, passes: int) -> Onward:
        """Return what reads guesses behind the requests' tokens."""
        tables = [work.batch.draft.tables[r.request_id] for r in work.requests]
        places = [len(r.tokens) - r.draft_start for r in work.requests]
        return onward(self.runner, tables, places, passes)

    def _states(self, batch: Batch, requests: Sequence[Request], lengths: Sequence[int]) -> Tensor:
        """Return the target's states before each unread token, on the draft's device."""
        tables = [batch.target.tables[r.request_id] for r in requests]
        spans = Spans(tables, [r.draft_computed for r in requests], lengths)
        layers, known = self.runner.model.config.state_layers, [r.computed for r in requests]
        states = self.target.states_before(spans, known, layers)
        model = self.runner.model
        return states.to(device=model.device, dtype=model.dtype)

    def _choose(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        alive: Array,
        place: int,
        laws: list[Tensor] | None,
        siblings: Siblings,
    ) -> tuple[Array, Array, Array]:
        """Return rows `alive`'s token ids, their laws' largest probability, and the token's own.

        What they are drawn from is added to laws, where there are some.
        """
        p = torch.softmax(logits.float(), -1)
        choice, peak = likeliest(p)
        live = [requests[row] for row in alive.tolist()]
        drawn = [i for i, r in enumerate(live) if r.sampling.temperature > 0.0]
        if siblings.count and len(drawn) < len(live):
            greedy = np.setdiff1d(np.arange(len(live)), drawn)
            siblings.see(p[torch.from_numpy(greedy)], choice[greedy], alive[greedy], place)
        if not drawn:
            return self.host_ids[choice], peak, peak
        q = probabilities(logits[drawn], [live[i].sampling for i in drawn])
        keys = [self._key(live[i], place) for i in drawn]
        choice[drawn] = race(q, keys, self.ids).cpu().numpy()
        if laws is not None:
            of_rows = torch.zeros(len(requests), q.shape[-1], dtype=torch.float64, device=q.device)
            of_rows[torch.from_numpy(alive[drawn]).to(q.device)] = q
            laws.append(of_rows)
        own = p[torch.arange(len(live)), torch.from_numpy(choice).to(p.device)]
        return self.host_ids[choice], peak, own.cpu().numpy()

    def _key(self, request: Request, place: int) -> int:
        """Return the key of a draft's draw: the target's own where the two are coupled.

        Else it names the step too: policies see what a rejected run did, so that its noise, drawn
        again, would let k depend on the tokens that it admits.
        """
        key, start = request_key(request, self.engine_seed), request.output_tokens
        if request.sampling.mode is SampleMode.COUPLED:
            return draw_key(key, start + place, Purpose.COUPLED)
        return draw_key(draw_key(key, start, Purpose.DRAFT), place, Purpose.DRAFT)


def _is_sampled(request: Request) -> bool:
    return request.sampling.mode is SampleMode.REJECTION


class _Ahead:
    """Reads guesses of a draft model's rows without their being read by the host."""

    def __init__(self, proposer: DraftModelProposer, work: Work) -> None:
        self.proposer, self.work = proposer, work
        self.tables = [work.batch.draft.tables[r.request_id] for r in work.requests]
        self.places = [len(r.tokens) - r.draft_start for r in work.requests]

    def first(self, alive: Array) -> Said:
        """Read what is unread; see `Drafter.first`."""
        landed = self.proposer.catch_up_on(self.work, alive)
        return Said(landed.logits, landed.after)

    def deeper(self, alive: Array, kept: Tensor | None, tokens: Tensor, place: int) -> Said:
        """Read one guess more of each row; see `Drafter.deeper`."""
        at = alive.tolist()
        spans = Spans(
            [self.tables[r] for r in at], [self.places[r] + place for r in at], [1] * len(at)
        )
        landed = self.proposer.runner.forward(tokens, spans)
        return Said(landed.logits, landed.after)
