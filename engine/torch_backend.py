"""The real backend: a target Llama, an optional draft model and the n-gram, on torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Batch, Drafts, Lookup, Verified
from parlay.engine.proposers.draft_model import DraftModelProposer
from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.request import Request
from parlay.engine.runner import Model, Runner
from parlay.engine.scheduler import EngineConfig
from parlay.engine.spans import Spans
from parlay.engine.verify import DraftLaw, accept, places_of
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Array, Fitted, Plan, Proposer


@dataclass(slots=True)
class DraftModel:
    """A draft model's parts: weights, and the target's token id of each row of its head."""

    model: Model
    ids: Tensor


class TorchBackend:
    """Runs the models; block tables come with each batch, cache contents live here."""

    def __init__(
        self,
        target: Model,
        draft: DraftModel | None,
        config: EngineConfig,
        k_max: int = 16,
        seed: int = 0,
    ) -> None:
        self.target, self.config, self.seed, self.k_max = target, config, seed, k_max
        taps = () if draft is None else draft.model.config.state_layers
        self.runner = Runner(target, config.target_blocks, config.block_tokens, taps)
        self.ngram = NgramProposer()
        self.draft: DraftModelProposer | None = None
        if draft is not None:
            runner = Runner(draft.model, config.draft_blocks, config.block_tokens)
            self.draft = DraftModelProposer(runner, draft.ids, seed, self.runner)

    def limits(self) -> EngineLimits:
        """Return the proposers that are there and the sizes."""
        mask = (
            1 << Proposer.NONE
            | 1 << Proposer.NGRAM
            | (self.draft is not None) << Proposer.DRAFT_MODEL
        )
        return EngineLimits(mask, self.k_max, (), self.config.token_budget)

    def clock(self) -> float:
        """Return seconds; on a GPU, after what was launched is done."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def lookup(self, requests: list[Request], depth: int) -> Lookup:
        """Ask the n-gram."""
        return self.ngram.lookup(requests, depth)

    def forget(self, request: Request) -> None:
        """Drop a request's n-gram index; its cache blocks are the scheduler's to free."""
        self.ngram.forget(request)

    @torch.inference_mode()
    def propose(self, batch: Batch, fit: Fitted, plan: Plan | None) -> Drafts:
        """Draft: n-gram rows from the lookup, draft-model rows by its passes; both in one batch."""
        depth = max(int(fit.k.max(initial=0)), 1)
        drafts = Drafts(
            count=np.zeros(len(batch), np.int32),
            tokens=np.full((len(batch), depth), -1, np.int64),
            confidences=np.full((len(batch), depth), np.nan, np.float32),
            read_by_draft=np.full(len(batch), -1, np.int32),
        )
        ngram = np.flatnonzero((fit.proposer == Proposer.NGRAM) & (fit.k > 0))
        if len(ngram):
            start_s = time.perf_counter()
            guess = np.where(
                np.arange(depth) < fit.k[ngram, None], batch.lookup.tokens[ngram, :depth], -1
            )
            drafts.tokens[ngram], drafts.count[ngram] = guess, (guess >= 0).sum(1)
            drafts.draft_ms[Proposer.NGRAM] = 1e3 * (time.perf_counter() - start_s)
        modelled = np.flatnonzero((fit.proposer == Proposer.DRAFT_MODEL) & (fit.k > 0))
        if len(modelled):
            self._propose_modelled(batch, modelled, fit.k, plan, drafts)
        return drafts

    def _propose_modelled(
        self, batch: Batch, rows: Array, k: Array, plan: Plan | None, drafts: Drafts
    ) -> None:
        assert self.draft is not None, "a plan named the draft model, which this engine has not"
        start_s = self.clock()
        run = self.draft.propose(batch, rows, k, plan)
        width = run.tokens.shape[1]
        drafts.count[rows], drafts.tokens[rows, :width] = run.count, run.tokens
        drafts.confidences[rows, :width], drafts.read_by_draft[rows] = run.confidences, run.read
        drafts.draft_depth, drafts.private = run.passes, run.law
        drafts.draft_ms[Proposer.DRAFT_MODEL] = 1e3 * (self.clock() - start_s)

    @torch.inference_mode()
    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Run the target over every row's chunk and drafts, and accept."""
        start_s = self.clock()
        k = np.minimum(verify_k, drafts.count)
        fed = [
            r.tokens[r.computed : r.computed + int(c)] + drafts.tokens[i, : k[i]].tolist()
            for i, (r, c) in enumerate(zip(batch.requests, batch.chunk, strict=True))
        ]
        lengths = [len(f) for f in fed]
        tables = [batch.target.tables[r.request_id] for r in batch.requests]
        starts = [r.computed for r in batch.requests]
        hidden = self.runner.read(fed, Spans(tables, starts, lengths))
        accepted, tokens = self._accept(batch, hidden, lengths, drafts, k)
        return Verified(accepted, tokens, len(hidden), 1e3 * (self.clock() - start_s))

    def _accept(
        self, batch: Batch, hidden: Tensor, lengths: list[int], drafts: Drafts, k: Array
    ) -> tuple[Array, Array]:
        """Compute logits where a token can come from, and accept; other rows get nothing."""
        accepted = np.zeros(len(batch), np.int32)
        tokens = np.full((len(batch), int(k.max(initial=0)) + 1), -1, np.int64)
        rows = np.flatnonzero(batch.emits)
        if len(rows):
            ends = np.cumsum(lengths)
            places = np.concatenate([np.arange(ends[r] - 1 - k[r], ends[r]) for r in rows])
            if len(places) < len(hidden):
                hidden = hidden[torch.from_numpy(places).to(hidden.device)]
            law: DraftLaw | None = drafts.private
            layout = places_of(rows, drafts.tokens, k)
            logits = self.target.logits(hidden)
            accepted[rows], found = accept(logits, batch.requests, layout, law, self.seed)
            tokens[rows, : found.shape[1]] = found
        return accepted, tokens
