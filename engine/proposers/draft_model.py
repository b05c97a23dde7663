"""Draft-model proposer: a small Llama with its own paged cache guesses k tokens, one pass a token.

Its first pass reads what it has not read yet (a few tokens when it drafted the step before, more
after idleness, of which a step reads only so many); each further pass is over the rows that go that
deep. A draft with state_layers reads each token beside the target's states of the token before. Its
own guesses have none yet, so those that are accepted are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Batch
from parlay.engine.branches import Branch
from parlay.engine.proposers.onward import Onward, onward
from parlay.engine.proposers.siblings import Siblings
from parlay.engine.request import Request, SampleMode
from parlay.engine.runner import Runner
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.spans import Spans
from parlay.engine.verify import DraftLaw
from parlay.policies.calibration import calibrated
from parlay.policies.types import ENTROPY_SCALE, Array, Plan, Proposer, StopKind, StopRule

STEADY_TOKENS = 17
"""A row with at most so many unread tokens has not been idle: a step can leave as many."""


@dataclass(slots=True)
class DraftRun:
    """What the draft model guessed for its rows: count i32 [rows], tokens i64 and confidences f32
    [rows, K], passes, the law of sampled drafts, and read i32 [rows], how many guesses the cache
    holds for good.

    caught_up: how many unread tokens were read of batch rows that still have some, and so drafted
    nothing; their `read` is -1. branches: what may stand beside the tokens of batch rows.
    """  # noqa: D205

    count: Array
    tokens: Array
    confidences: Array
    passes: int
    law: DraftLaw
    read: Array
    caught_up: dict[int, int]
    branches: dict[int, list[Branch]]

    def watch(self, rows: Array, seen: Array) -> dict[int, list[int]]:
        """Return the guesses of batch rows rows[seen] to be matched, by row; nothing verifies them.

        The first laws of those that rejection sampling would verify go to `law.watched` instead.
        """
        guesses: dict[int, list[int]] = {}
        for i in np.flatnonzero(seen).tolist():
            row, count = int(rows[i]), int(self.count[i])
            place = self.law.row.pop(row, None)
            if count and place is None:
                guesses[row] = self.tokens[i, :count].tolist()
            elif count and place is not None:
                self.law.watched[row] = self.law.law[0][place]
        return guesses

    def only(self, rows: Array) -> DraftRun:
        """Return the run of some rows, bool or indices; passes and laws are everybody's."""
        return replace(
            self,
            count=self.count[rows],
            tokens=self.tokens[rows],
            confidences=self.confidences[rows],
            read=self.read[rows],
        )


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
        self._host_ids = ids.cpu().numpy()

    def propose(
        self, batch: Batch, rows: Array, k: Array, plan: Plan | None, beside: int = 0
    ) -> DraftRun:
        """Draft up to k[row] tokens for each batch row of `rows`, all of which are at least 1.

        beside: how many next-best tokens of each place of greedy rows become branches.
        """
        deepest = np.argsort(-k[rows], kind="stable")
        order = rows[deepest]
        requests = [batch.requests[r] for r in order]
        share, late = self._shares(requests)
        depth, most = np.where(late, 0, k[order]), int(k[order[0]])
        # What is only observed is observed to its end: where it is sure it holds more often.
        watched = batch.shadow_k[order] > 0 if len(batch.shadow_k) else np.zeros(len(order), bool)
        guess = np.full((len(order), most), -1, np.int64)
        confidence = np.full((len(order), most), np.nan, np.float32)
        law = DraftLaw(
            {int(r): i for i, r in enumerate(order) if _is_sampled(batch.requests[r])}, [], self.ids
        )
        stop = plan.stop_rule if plan else StopRule()
        siblings = Siblings(beside, order, self._host_ids)
        reach, alive = np.ones(len(order)), np.flatnonzero(depth)
        logits, passes = self._catch_up(batch, requests, share, alive), 1
        while True:
            place = passes - 1
            chosen, peak, own = self._choose(logits, requests, alive, place, law, siblings)
            confidence[alive, place] = peak
            if stop.kind is not StopKind.NONE:
                reach[alive] *= estimate(plan, Proposer.DRAFT_MODEL, place, peak)
                go = keeps_drafting(stop, reach[alive], logits, place) | watched[alive]
                alive, chosen, own = alive[go], chosen[go], own[go]
            guess[alive, place] = chosen
            if stop.kind is StopKind.PROBABILITY:
                # The token that falls below the threshold is kept; drafting ends behind it.
                alive = alive[(own >= stop.threshold) | watched[alive]]
            alive = alive[depth[alive] > passes]
            if not len(alive):
                break
            if passes == 1:
                ahead = self._ahead(batch, requests, most - 1)
            logits = ahead.read(alive, guess[alive, place], place)
            passes += 1
        back = np.argsort(deepest)
        guess, confidence, late = guess[back], confidence[back], late[back]
        count = (guess >= 0).sum(1).astype(np.int32)
        read = np.zeros_like(count) if self.reads_states else np.maximum(count - 1, 0)
        read[late] = -1
        part = dict(zip(rows[late].tolist(), share[back][late].tolist(), strict=True))
        return DraftRun(count, guess, confidence, passes, law, read, part, siblings.branches)

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

    def _catch_up(
        self, batch: Batch, requests: Sequence[Request], share: Array, alive: Array
    ) -> Tensor:
        """Read share[i] unread tokens of each request; return logits after those of rows alive."""
        fed = [r.tokens[r.draft_computed :][:n] for r, n in zip(requests, share, strict=True)]
        live = [(r, f) for r, f in zip(requests, fed, strict=True) if f]
        lengths = [len(f) for _, f in live]
        starts = [r.draft_computed - r.draft_start for r, _ in live]
        spans = Spans([batch.draft.tables[r.request_id] for r, _ in live], starts, lengths)
        states = None
        if self.reads_states:
            states = self._states(batch, [r for r, _ in live], lengths)
        hidden = self.runner.read([f for _, f in live], spans, states)
        model = self.runner.model
        if len(alive) < len(hidden):
            last = np.cumsum(share)[alive] - 1
            hidden = hidden[torch.from_numpy(last).to(model.device)]
        return model.logits(hidden)

    def _ahead(self, batch: Batch, requests: Sequence[Request], passes: int) -> Onward:
        """Return what reads guesses behind the requests' tokens."""
        tables = [batch.draft.tables[r.request_id] for r in requests]
        return onward(
            self.runner, tables, [len(r.tokens) - r.draft_start for r in requests], passes
        )

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
        law: DraftLaw,
        siblings: Siblings,
    ) -> tuple[Array, Array, Array]:
        """Return rows `alive`'s token ids, their laws' largest probability, and the token's own."""
        p = torch.softmax(logits.float(), -1)
        choice, peak = likeliest(p)
        live = [requests[row] for row in alive.tolist()]
        drawn = [i for i, r in enumerate(live) if r.sampling.temperature > 0.0]
        if siblings.count and len(drawn) < len(live):
            greedy = np.setdiff1d(np.arange(len(live)), drawn)
            siblings.see(p[torch.from_numpy(greedy)], choice[greedy], alive[greedy], place)
        if not drawn:
            return self._host_ids[choice], peak, peak
        q = probabilities(logits[drawn], [live[i].sampling for i in drawn])
        keys = [self._key(live[i], place) for i in drawn]
        choice[drawn] = race(q, keys, self.ids).cpu().numpy()
        if law.row:
            laws = torch.zeros(len(requests), q.shape[-1], dtype=torch.float64, device=q.device)
            laws[torch.from_numpy(alive[drawn]).to(q.device)] = q
            law.law.append(laws)
        own = p[torch.arange(len(live)), torch.from_numpy(choice).to(p.device)]
        return self._host_ids[choice], peak, own.cpu().numpy()

    def _key(self, request: Request, place: int) -> int:
        """Return the key of a draft's draw: the target's own where the two are coupled.

        Else it names the step too: policies see what a rejected run did, so that its noise, drawn
        again, would let k depend on the tokens that it admits.
        """
        key, start = request_key(request, self.engine_seed), request.output_tokens
        if request.sampling.mode is SampleMode.COUPLED:
            return draw_key(key, start + place, Purpose.COUPLED)
        return draw_key(draw_key(key, start, Purpose.DRAFT), place, Purpose.DRAFT)


def likeliest(p: Tensor) -> tuple[Array, Array]:
    """Return the first of the largest entries of each row of p f32 [rows, n]: index and value."""
    if p.device.type == "cpu":
        # A sixth of the time of torch's max along a row.
        law = p.numpy()
        best = law.argmax(-1)
        return best, law[np.arange(len(best)), best]
    peak, index = p.max(-1)
    return index.cpu().numpy(), peak.cpu().numpy()


def _is_sampled(request: Request) -> bool:
    return request.sampling.mode is SampleMode.REJECTION


def estimate(plan: Plan | None, proposer: Proposer, place: int, peak: Array) -> Array:
    """Return P(accepted), as a plan has it, at a place whose likeliest token has chance `peak`."""
    if plan is None or plan.calibration is None:
        return peak
    lines = plan.calibration[proposer].reshape(2, -1)
    # A line a place, the last of which goes for all that follow.
    slope, offset = lines[:, min(place, lines.shape[1] - 1)]
    return calibrated(peak, float(slope), float(offset))


def keeps_drafting(stop: StopRule, reach: Array, logits: Tensor, place: int) -> Array:
    """Return bool [rows]: whether to draft this place, judged before its token is drawn."""
    keep: Array = np.ones(len(reach), bool)
    if stop.kind is StopKind.SURVIVAL:
        keep = np.greater_equal(reach, stop.threshold)
    elif place > 0 and stop.kind is StopKind.ENTROPY:
        entropy = torch.special.entr(torch.softmax(logits.float(), -1)).sum(-1).cpu().numpy()
        keep = np.less_equal(np.sqrt(ENTROPY_SCALE * entropy), stop.threshold)
    return keep
