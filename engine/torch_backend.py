"""The real backend: a target Llama, an optional draft model and the n-gram, on torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.backend import Batch, Drafts, Lookup, Verified
from parlay.engine.branches import Branch, least_worth, match_branches
from parlay.engine.graph_capture import Capture, CudaCapture
from parlay.engine.graph_heads import HeadGraphs
from parlay.engine.graphs import GraphStats, edges_up_to
from parlay.engine.judge import Verdict, judge, judge_on_device
from parlay.engine.kv_cache import BlockCache
from parlay.engine.landed import Landed
from parlay.engine.medusa_heads import Heads
from parlay.engine.proposers.confidence import choice_and_peak
from parlay.engine.proposers.draft_model import DraftModelProposer
from parlay.engine.proposers.medusa import MedusaProposer
from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.proposers.unread import put_into, settle, take, values
from parlay.engine.request import Request
from parlay.engine.runner import Flight, Model, Runner, flat
from parlay.engine.scheduler import EngineConfig
from parlay.engine.spans import Spans, kept_nodes
from parlay.engine.timing import Mark
from parlay.engine.transfer import upload
from parlay.engine.verify import Places, places_of
from parlay.policies.allocate import weighs_drafts
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Array, Fitted, Plan, Proposer


@dataclass(slots=True)
class DraftModel:
    """A draft model's parts: weights, and the target's token id of each row of its head."""

    model: Model
    ids: Tensor


@dataclass(slots=True)
class Flying:
    """A verification on its way, from when it began to when its launch had returned.

    verdict: what waits for acceptance, where the device has been told of that too.
    """

    batch: Batch
    drafts: Drafts
    layout: Places
    flight: Flight
    verdict: Verdict | None
    start: Mark
    away: Mark


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
            runner = Runner(
                draft.model, config.draft_blocks, config.block_tokens, after=choice_and_peak
            )
            self.draft = DraftModelProposer(
                runner, draft.ids, seed, self.runner, config.draft_catch_up_tokens
            )
        self.medusa = None if heads is None else MedusaProposer(heads, seed, self.runner)
        self.judge = judge if target.device.type == "cpu" else judge_on_device
        self._timed: list[tuple[Drafts, Proposer, Mark, Mark]] = []
        self.use_graphs(lambda device: CudaCapture(device) if device.type == "cuda" else None)

    def use_graphs(self, capture: Callable[[torch.device], Capture | None]) -> None:
        """Replay small passes from now on, on devices for which there is a capture."""
        config, deepest = self.config, self.k_max + 1
        runners = [self.runner] if self.draft is None else [self.runner, self.draft.runner]
        for runner in runners:
            if (made := capture(runner.model.device)) is not None:
                runner.use_graphs(config.max_running * deepest, config.positions, made)
        if self.medusa is not None:
            made = capture(self.medusa.heads.ids.device)
            if made is not None:
                edges = edges_up_to(config.max_running)
                self.medusa.graphs = HeadGraphs(self.medusa.heads, edges, made)

    def graph_stats(self) -> dict[str, GraphStats]:
        """Return what graphs did for target, draft and heads; none where there are no graphs."""
        draft = None if self.draft is None else self.draft.runner.graphs
        heads = None if self.medusa is None else self.medusa.graphs
        named = {"target": self.runner.graphs, "draft": draft, "heads": heads}
        return {name: graphs.stats for name, graphs in named.items() if graphs is not None}

    def limits(self) -> EngineLimits:
        """Return the proposers that are there and the sizes."""
        mask = (
            1 << Proposer.NONE
            | 1 << Proposer.NGRAM
            | (self.draft is not None) << Proposer.DRAFT_MODEL
            | (self.medusa is not None) << Proposer.MEDUSA
        )
        graphs = self.runner.graphs
        edges = () if graphs is None else graphs.edges
        return EngineLimits(mask, self.k_max, edges, self.config.token_budget)

    def clock(self) -> float:
        """Return seconds. At a step's end that is when its work is done: `land` has waited."""
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
        # Who judges on a CPU, grows trees or has to choose among drafts reads them first.
        read = self.judge is judge or width > 1 or plan is None or weighs_drafts(plan, fit)
        k = np.where(fit.proposer == Proposer.DRAFT_MODEL, fit.k, 0)
        k += batch.shadow_k if len(batch.shadow_k) else 0
        if k.any():
            self._propose_modelled(batch, k, plan, drafts, width - 1, read)
        k = np.where(fit.proposer == Proposer.MEDUSA, fit.k, 0)
        k += batch.heads_k if len(batch.heads_k) else 0
        if k.any():
            self._propose_headed(batch, k, plan, drafts, width - 1, read)
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
        self, batch: Batch, k: Array, plan: Plan | None, drafts: Drafts, beside: int, read: bool
    ) -> None:
        assert self.draft is not None, "a plan named the draft model, which this engine has not"
        rows, device = np.flatnonzero(k), self.draft.runner.model.device
        start = Mark(device)
        run = self.draft.propose(batch, rows, k, plan, beside, read)
        drafts.read_by_draft[rows], drafts.caught_up = run.read, run.caught_up
        if len(batch.shadow_k) and len(seen := rows[batch.shadow_k[rows] > 0]):
            drafts.read_by_draft[seen] = np.minimum(drafts.read_by_draft[seen], 0)
        drafts.draft_depth, drafts.private = run.passes, run.law
        take(drafts, run, rows, batch.shadow_k, drafts.watched)
        self._took(drafts, Proposer.DRAFT_MODEL, start, Mark(device))

    def _propose_headed(
        self, batch: Batch, k: Array, plan: Plan | None, drafts: Drafts, beside: int, read: bool
    ) -> None:
        assert self.medusa is not None, "a plan named Medusa heads, which this engine has not"
        rows, device = np.flatnonzero(k), self.medusa.heads.ids.device
        start = Mark(device)
        run = self.medusa.propose(batch, rows, k, plan, beside, read)
        take(drafts, run, rows, batch.heads_k, drafts.heads_watched)
        self._took(drafts, Proposer.MEDUSA, start, Mark(device))

    def _took(self, drafts: Drafts, proposer: Proposer, start: Mark, end: Mark) -> None:
        """Note what drafting took; on a GPU that is known once the step has landed."""
        if end.event is None:
            drafts.draft_ms[proposer] = start.ms_until(end)
        else:
            self._timed.append((drafts, proposer, start, end))

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Run the target over every row's chunk and drafts, and accept."""
        return self.land(self._launch(batch, drafts, verify_k, beside=False))

    def launch(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Flying:
        """Begin what `verify` does; the target's pass goes on beside Python where it can."""
        return self._launch(batch, drafts, verify_k, beside=True)

    @torch.inference_mode()
    def _launch(self, batch: Batch, drafts: Drafts, verify_k: Array, beside: bool) -> Flying:
        start, self._book = Mark(self.target.device), batch.target
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
        rows, ends = np.flatnonzero(batch.emits), np.cumsum(lengths)
        places = [np.arange(ends[r] - 1 - k[r], ends[r]) for r in rows]
        where = np.concatenate(places) if places else np.zeros(0, np.int64)
        layout = places_of(rows, tokens, k)
        ids = put_into(flat(fed), drafts.unread, ends, k, self.target.device)
        if isinstance(ids, Tensor):
            # Behind what waits for a drafter on another device: its time is not the target's.
            start = Mark(self.target.device)
            layout.fed = ids[upload(self.target.device, where)[0]]
        flight = self.runner.launch(ids, spans, where, beside)
        verdict = None
        if len(rows) and isinstance(flight.made, Landed):
            verdict = self._judge(batch, flight.made, layout, drafts)
        return Flying(batch, drafts, layout, flight, verdict, start, Mark(self.target.device))

    @torch.inference_mode()
    def land(self, flying: Flying) -> Verified:
        """Wait for the target's pass, and accept."""
        batch, layout = flying.batch, flying.layout
        shade_ms = 1e3 * (time.perf_counter() - flying.away.at_s)
        landed = self.runner.land(flying.flight)
        verified = Verified(
            accepted=np.zeros(len(batch), np.int32),
            tokens=np.full((len(batch), int(layout.k.max(initial=0)) + 1), -1, np.int64),
            padded_tokens=len(landed.hidden),
            verify_ms=0.0,
        )
        if len(rows := layout.rows):
            verdict = flying.verdict or self._judge(batch, landed, layout, flying.drafts)
            judged = verdict()
            settle(flying.drafts, judged.told)
            verified.accepted[rows] = judged.accepted
            verified.tokens[rows, : judged.tokens.shape[1]] = judged.tokens
            verified.logprobs, verified.overlaps = judged.logprobs, judged.overlaps
            if judged.path is not None:
                self._follow(flying.flight.spans, rows, judged.path, verified)
        flying.away.wait()
        self._tell_times(flying, verified, shade_ms - landed.busy_ms)
        return verified

    def _tell_times(self, flying: Flying, verified: Verified, idle_ms: float) -> None:
        """Say what drafting and the target's pass took; idle_ms: beside which nothing ran."""
        for drafts, proposer, start, end in self._timed:
            end.wait()  # on a device of its own nobody need have waited for it yet
            drafts.draft_ms[proposer] = start.ms_until(end)
        self._timed.clear()
        if flying.away.event is None:
            # What was done meanwhile is the pass's time as far as the pass took as long.
            end = Mark(self.target.device)
            verified.verify_ms = flying.start.ms_until(end) - max(idle_ms, 0.0)
        else:
            verified.verify_ms = flying.start.ms_until(flying.away)

    def _judge(self, batch: Batch, landed: Landed, layout: Places, drafts: Drafts) -> Verdict:
        """Begin to accept what holds in the rows that emit."""
        choice = landed.after[0] if landed.after else None
        besides = values(drafts.unread, self.target.device)
        return self.judge(
            landed.logits, batch.requests, layout, drafts.trees, drafts.private, self.seed, choice,
            besides,
        )  # fmt: skip

    def _follow(self, spans: Spans, rows: Array, path: Array, verified: Verified) -> None:
        """Move what was kept of accepted nodes behind the text; path i64 [rows, D]."""
        paths = np.full((len(spans.lengths), path.shape[1]), -1, np.int64)
        paths[rows] = path
        verified.on_chain = np.cumprod(paths == np.arange(path.shape[1]), 1).sum(1).astype(np.int32)
        self.runner.move(*kept_nodes(spans, paths, self.config.block_tokens))
