"""The real backend: a target Llama, an optional draft model and the n-gram, on torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Batch, Drafts, Lookup, Verified
from parlay.engine.branches import Branch, least_worth, match_branches
from parlay.engine.kv_cache import BlockCache
from parlay.engine.logprobs import logprobs_of
from parlay.engine.medusa_heads import Heads
from parlay.engine.proposers.draft_model import DraftModelProposer, DraftRun
from parlay.engine.proposers.medusa import HeadsRun, MedusaProposer
from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.request import Request
from parlay.engine.runner import Model, Runner
from parlay.engine.scheduler import EngineConfig
from parlay.engine.spans import Spans, kept_nodes
from parlay.engine.tree_verify import accept_trees
from parlay.engine.verify import DraftLaw, Places, accept, overlaps, places_of
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
        heads: Heads | None = None,
    ) -> None:
        self.target, self.config, self.seed, self.k_max = target, config, seed, k_max
        taps = set() if draft is None else set(draft.model.config.state_layers)
        taps.update(() if heads is None else heads.state_layers)
        self.runner = Runner(target, config.target_blocks, config.block_tokens, sorted(taps))
        self._book: BlockCache | None = None
        self.ngram = NgramProposer()
        self.draft: DraftModelProposer | None = None
        if draft is not None:
            runner = Runner(draft.model, config.draft_blocks, config.block_tokens)
            self.draft = DraftModelProposer(
                runner, draft.ids, seed, self.runner, config.draft_catch_up_tokens
            )
        self.medusa = None if heads is None else MedusaProposer(heads, seed, self.runner)

    def limits(self) -> EngineLimits:
        """Return the proposers that are there and the sizes."""
        mask = (
            1 << Proposer.NONE
            | 1 << Proposer.NGRAM
            | (self.draft is not None) << Proposer.DRAFT_MODEL
            | (self.medusa is not None) << Proposer.MEDUSA
        )
        return EngineLimits(mask, self.k_max, (), self.config.token_budget)

    def clock(self) -> float:
        """Return seconds; on a GPU, after what was launched is done."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def keeps(self, book: BlockCache) -> bool:
        """Say whether nobody wrote by another's tables since."""
        return self._book is book

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
        width = self.config.tree_width if least_worth(plan) < np.inf else 1
        ngram = np.flatnonzero((fit.proposer == Proposer.NGRAM) & (fit.k > 0))
        if len(ngram):
            start_s = time.perf_counter()
            guess = np.where(
                np.arange(depth) < fit.k[ngram, None], batch.lookup.tokens[ngram, :depth], -1
            )
            drafts.tokens[ngram], drafts.count[ngram] = guess, (guess >= 0).sum(1)
            if width > 1:
                drafts.branches |= self._matches(batch, ngram, fit.k, guess[:, 0], width)
            drafts.draft_ms[Proposer.NGRAM] = 1e3 * (time.perf_counter() - start_s)
        k = np.where(fit.proposer == Proposer.DRAFT_MODEL, fit.k, 0)
        k += batch.shadow_k if len(batch.shadow_k) else 0
        if k.any():
            self._propose_modelled(batch, np.flatnonzero(k), k, plan, drafts, width)
        k = np.where(fit.proposer == Proposer.MEDUSA, fit.k, 0)
        k += batch.heads_k if len(batch.heads_k) else 0
        if k.any():
            self._propose_headed(batch, np.flatnonzero(k), k, plan, drafts, width)
        return drafts

    def _matches(
        self, batch: Batch, rows: Array, k: Array, chain: Array, width: int
    ) -> dict[int, list[Branch]]:
        """Return what else followed in n-gram rows; chain i64 [rows]: their first tokens."""
        found: dict[int, list[Branch]] = {}
        for row, token in zip(rows.tolist(), chain.tolist(), strict=True):
            others = self.ngram.candidates(batch.requests[row], int(k[row]), width)
            if len(others.tokens) > 1:
                found[row] = match_branches(others, token)
        return found

    def _propose_modelled(
        self, batch: Batch, rows: Array, k: Array, plan: Plan | None, drafts: Drafts, width: int
    ) -> None:
        assert self.draft is not None, "a plan named the draft model, which this engine has not"
        start_s = self.clock()
        run = self.draft.propose(batch, rows, k, plan, width - 1)
        drafts.read_by_draft[rows], drafts.caught_up = run.read, run.caught_up
        drafts.draft_depth, drafts.private = run.passes, run.law
        if len(batch.shadow_k) and (seen := batch.shadow_k[rows] > 0).any():
            drafts.watched = run.watch(rows, seen)
            drafts.read_by_draft[rows[seen]] = np.minimum(run.read[seen], 0)
            rows, run = rows[~seen], run.only(~seen)
        fill(drafts, rows, run)
        drafts.draft_ms[Proposer.DRAFT_MODEL] = 1e3 * (self.clock() - start_s)

    def _propose_headed(
        self, batch: Batch, rows: Array, k: Array, plan: Plan | None, drafts: Drafts, width: int
    ) -> None:
        assert self.medusa is not None, "a plan named Medusa heads, which this engine has not"
        start_s = self.clock()
        run = self.medusa.propose(batch, rows, k, plan, width - 1)
        if len(batch.heads_k) and (seen := batch.heads_k[rows] > 0).any():
            drafts.heads_watched = run.watch(rows, seen)
            rows, run = rows[~seen], run.only(~seen)
        fill(drafts, rows, run)
        drafts.draft_ms[Proposer.MEDUSA] = 1e3 * (self.clock() - start_s)

    @torch.inference_mode()
    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Run the target over every row's chunk and drafts, and accept."""
        start_s, self._book = self.clock(), batch.target
        k, tokens, trees = np.minimum(verify_k, drafts.count), drafts.tokens, drafts.trees
        if trees is not None:
            k, tokens = trees.counts.astype(np.int32), trees.padded_tokens()
        fed = [
            r.tokens[r.computed : r.computed + int(c)] + tokens[i, : k[i]].tolist()
            for i, (r, c) in enumerate(zip(batch.requests, batch.chunk, strict=True))
        ]
        lengths = [len(f) for f in fed]
        tables = [batch.target.tables[r.request_id] for r in batch.requests]
        spans = Spans(tables, [r.computed for r in batch.requests], lengths, trees)
        hidden = self.runner.read(fed, spans)
        verified = Verified(
            accepted=np.zeros(len(batch), np.int32),
            tokens=np.full((len(batch), int(k.max(initial=0)) + 1), -1, np.int64),
            padded_tokens=len(hidden),
            verify_ms=0.0,
        )
        rows = np.flatnonzero(batch.emits)
        if len(rows):
            ends = np.cumsum(lengths)
            places = np.concatenate([np.arange(ends[r] - 1 - k[r], ends[r]) for r in rows])
            if len(places) < len(hidden):
                hidden = hidden[torch.from_numpy(places).to(hidden.device)]
            layout = places_of(rows, tokens, k)
            path = self._accept(batch, self.target.logits(hidden), layout, drafts, verified)
            if path is not None:
                self._follow(spans, rows, path, verified)
        verified.verify_ms = 1e3 * (self.clock() - start_s)
        return verified

    def _accept(
        self, batch: Batch, logits: Tensor, layout: Places, drafts: Drafts, verified: Verified
    ) -> Array | None:
        """Accept what holds in the rows that emit; return the nodes accepted where there are trees.

        logits: where a token of these rows can come from.
        """
        law: DraftLaw | None = drafts.private
        rows, requests, path = layout.rows, batch.requests, None
        if drafts.trees is None:
            accepted, found = accept(logits, requests, layout, law, self.seed)
        else:
            walked = accept_trees(logits, requests, rows, drafts.trees, law, self.seed)
            accepted, found, path = walked.accepted, walked.tokens, walked.path
        verified.accepted[rows], verified.tokens[rows, : found.shape[1]] = accepted, found
        verified.logprobs = logprobs_of(logits, requests, layout, accepted, found, path)
        verified.overlaps = overlaps(logits, requests, layout, law)
        return path

    def _follow(self, spans: Spans, rows: Array, path: Array, verified: Verified) -> None:
        """Move what was kept of accepted nodes behind the text; path i64 [rows, D]."""
        paths = np.full((len(spans.lengths), path.shape[1]), -1, np.int64)
        paths[rows] = path
        verified.on_chain = np.cumprod(paths == np.arange(path.shape[1]), 1).sum(1).astype(np.int32)
        self.runner.move(*kept_nodes(spans, paths, self.config.block_tokens))


def fill(drafts: Drafts, rows: Array, run: DraftRun | HeadsRun) -> None:
    """Take what a model guessed for batch rows `rows`; what stands beside other rows is dropped."""
    depth = min(run.tokens.shape[1], drafts.tokens.shape[1])
    drafts.count[rows], drafts.tokens[rows, :depth] = run.count, run.tokens[:, :depth]
    drafts.confidences[rows, :depth] = run.confidences[:, :depth]
    mine = set(rows.tolist())
    drafts.branches |= {row: found for row, found in run.branches.items() if row in mine}
