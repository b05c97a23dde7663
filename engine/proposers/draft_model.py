"""Draft-model proposer: a small Llama with its own paged cache guesses k tokens, one pass a token.

Its first pass reads whatever it has not read yet (one token when it drafted the step before, more
after idleness); each further pass is over the rows that go that deep. A draft with state_layers
reads each token beside the target's states of the token before. Its own guesses have none yet, so
those that are accepted are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Batch
from parlay.engine.request import Request, SampleMode
from parlay.engine.runner import Runner
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.spans import Spans
from parlay.engine.verify import DraftLaw
from parlay.policies.calibration import calibrated
from parlay.policies.types import ENTROPY_SCALE, Array, Plan, Proposer, StopKind, StopRule


@dataclass(slots=True)
class DraftRun:
    """What the draft model guessed for its rows: count i32 [rows], tokens i64 and confidences f32
    [rows, K], passes, the law of sampled drafts, and read i32 [rows], how many guesses the cache
    holds for good.
    """  # noqa: D205

    count: Array
    tokens: Array
    confidences: Array
    passes: int
    law: DraftLaw
    read: Array


class DraftModelProposer:
    """A draft model on its own device in its own dtype, with the target's tokenizer.

    ids i64 [head rows]: the target's token id of each row of the trimmed head. target: keeps the
    states of the layers that the draft reads.
    """

    def __init__(self, runner: Runner, ids: Tensor, engine_seed: int, target: Runner) -> None:
        self.runner, self.ids, self.engine_seed, self.target = runner, ids, engine_seed, target
        self.reads_states = bool(runner.model.config.state_layers)
        self._host_ids = ids.cpu().numpy()

    def propose(self, batch: Batch, rows: Array, k: Array, plan: Plan | None) -> DraftRun:
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
        stop = plan.stop_rule if plan else StopRule()
        reach, alive = np.ones(len(order)), np.arange(len(order))
        passes = 0
        for place in range(depth):
            alive = alive[k[order[alive]] > place]
            if not len(alive):
                break
            logits = self._read(batch, [requests[i] for i in alive], guess[alive, :place])
            chosen, peak, own = self._choose(logits, requests, alive, place, law)
            passes += 1
            reach[alive] *= estimate(plan, peak)
            confidence[alive, place] = peak
            go = keeps_drafting(stop, reach[alive], logits, place)
            alive, chosen, own = alive[go], chosen[go], own[go]
            guess[alive, place] = chosen
            if stop.kind is StopKind.PROBABILITY:
                # The token that falls below the threshold is kept; drafting ends behind it.
                alive = alive[own >= stop.threshold]
        back = np.argsort(deepest)
        guess, confidence = guess[back], confidence[back]
        count = (guess >= 0).sum(1).astype(np.int32)
        read = np.zeros_like(count) if self.reads_states else np.maximum(count - 1, 0)
        return DraftRun(count, guess, confidence, passes, law, read)

    def _read(self, batch: Batch, requests: Sequence[Request], guesses: Array) -> Tensor:
        """Return logits [rows, head rows] after each request's tokens and guesses; one pass."""
        place = guesses.shape[1]
        if place:
            starts = [len(r.tokens) + place - 1 - r.draft_start for r in requests]
            fed: list[list[int]] = [[int(t)] for t in guesses[:, -1]]
        else:
            starts = [r.draft_computed - r.draft_start for r in requests]
            fed = [r.tokens[r.draft_computed :] for r in requests]
        lengths = [len(f) for f in fed]
        tables = [batch.draft.tables[r.request_id] for r in requests]
        states = self._states(batch, requests, lengths) if not place and self.reads_states else None
        model = self.runner.model
        hidden = self.runner.read(fed, Spans(tables, starts, lengths), states)
        last = torch.tensor(np.cumsum(lengths) - 1, device=model.device)
        return model.logits(hidden if max(lengths) == 1 else hidden[last])

    def _states(self, batch: Batch, requests: Sequence[Request], lengths: Sequence[int]) -> Tensor:
        """Return the target's states before each unread token, on the draft's device."""
        tables = [batch.target.tables[r.request_id] for r in requests]
        spans = Spans(tables, [r.draft_computed for r in requests], lengths)
        states = self.target.states_before(spans, [r.computed for r in requests])
        model = self.runner.model
        return states.to(device=model.device, dtype=model.dtype)

    def _choose(
        self, logits: Tensor, requests: Sequence[Request], alive: Array, place: int, law: DraftLaw
    ) -> tuple[Array, Array, Array]:
        """Return rows `alive`'s token ids, their laws' largest probability, and the token's own."""
        p = torch.softmax(logits.float(), -1)
        peak, best = p.max(-1)
        choice = best.cpu().numpy()
        live = [requests[row] for row in alive]
        drawn = [i for i, r in enumerate(live) if r.sampling.mode is not SampleMode.GREEDY]
        if drawn:
            q = probabilities(logits[drawn], [live[i].sampling for i in drawn])
            keys = [self._key(live[i], place) for i in drawn]
            choice[drawn] = race(q, keys, self.ids).cpu().numpy()
            if law.row:
                laws = torch.zeros(len(requests), q.shape[-1], dtype=torch.float64, device=q.device)
                laws[torch.from_numpy(alive[drawn]).to(q.device)] = q
                law.law.append(laws)
        own = p[torch.arange(len(live)), torch.from_numpy(choice).to(p.device)]
        return self._host_ids[choice], peak.cpu().numpy(), own.cpu().numpy()

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


def estimate(plan: Plan | None, peak: Array) -> Array:
    """Return what the plan thinks of places whose likeliest token has probability `peak`."""
    if plan is None or plan.calibration is None:
        return peak
    slope, offset = plan.calibration[Proposer.DRAFT_MODEL]
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
