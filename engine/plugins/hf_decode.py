"""One call of Hugging Face's generate, decoded with drafts: a step proposes, verifies and commits.

The passes of the target are those of plain generate, prepared by the model's own methods; a step
only hands over more tokens at once and gives back the cache of those that fail.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from parlay.engine.backend import Lookup
from parlay.engine.plugins.adapter import Adapter, Decision, Load, StepResult, Tracked
from parlay.engine.plugins.hf_choose import Chooser
from parlay.engine.plugins.hf_draft import DraftReader, Run
from parlay.engine.plugins.hf_plain import cache_of
from parlay.engine.plugins.tracked import Columns, standing_of
from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.request import Request
from parlay.engine.shadow import ShadowScorer
from parlay.policies.types import DRAFT_MODEL, NGRAM, PROPOSERS, Array, Truncated


@dataclass(slots=True)
class Call:
    """What generate was asked, as it has prepared it; kwargs are of the model."""

    model: Any
    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Proposal:
    """A step's drafts: token ids to verify of `drafted` tokens, confidences, and what they cost."""

    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    confidences: list[float] = field(default_factory=list)
    passes: int = 0
    draft_ms: Array = field(default_factory=lambda: np.zeros(PROPOSERS, np.float32))


class Decoding:
    """Decodes one text; the adapter decides before each step who drafts how many tokens."""

    def __init__(
        self, adapter: Adapter, tracked: Tracked, ngram: NgramProposer, draft: Any, call: Call
    ) -> None:
        self.adapter, self.tracked, self.ngram, self.call = adapter, tracked, ngram, call
        self.model, self.ids, self.kwargs = call.model, call.input_ids, call.kwargs
        tokens = _without_padding(call)
        self.request = Request(tracked.request_id, tokens, len(tokens))
        self.draft = DraftReader(draft) if draft is not None else None
        self.chooser = Chooser(call.processors, bool(call.config.do_sample))
        self.shadow = ShadowScorer()
        sampled = bool(call.config.do_sample)
        tracked.temperature = float(call.config.temperature or 1.0) * sampled
        tracked.seeded = sampled
        self.columns = Columns([tracked], adapter.limits)
        self.done, self.can_crop = False, True
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._step_end_s = time.perf_counter()

    def run(self) -> Any:
        """Decode to the end; returns what generate returns."""
        try:
            self._step(self._prefill)
            optimised = getattr(self.model, "_optimize_model_for_decode", contextlib.nullcontext)
            with optimised():
                while not self.done:
                    self._step(self._decode)
        finally:
            self.ngram.forget(self.request)
        if self.call.streamer is not None:
            self.call.streamer.end()
        return self._output()

    def _step(self, forward: Callable[[list[int]], Any]) -> None:
        """Decide, draft, verify, commit, report; forward runs the target over given drafts."""
        lookup = self._lookup()
        self._describe(lookup)
        view = self.columns.view(standing_of([self.tracked]), Load())
        decision = self.adapter.decide(view)
        before = len(self.request.tokens)
        proposal = self._propose(decision, lookup)
        start_s = time.perf_counter()
        outputs = forward(proposal.tokens)
        verified, accepted = self._accept(outputs.logits, proposal.tokens)
        emitted = len(self.request.tokens) - before
        self._settle(outputs, len(proposal.tokens), emitted, before + accepted)
        end_s = time.perf_counter()
        result = StepResult(
            drafted=[proposal.drafted],
            verified=[verified],
            accepted=[accepted],
            emitted=[emitted],
            truncated_by=np.asarray([self._truncated()], np.uint8),
            confidences=_row(proposal.confidences),
            shadow=self.shadow.score([self.request]),
            draft_ms=proposal.draft_ms,
            draft_depth=proposal.passes,
            verify_ms=1e3 * (end_s - start_s),
            step_ms=1e3 * (end_s - self._step_end_s),
            padded_tokens=max(self.tracked.prefill_tokens, 1) + len(proposal.tokens),
        )
        self._step_end_s = end_s
        self.adapter.observe(decision, result)

    def _lookup(self) -> Lookup:
        """Ask the n-gram, where it may draft and the prompt is behind us."""
        limits, allowed = self.adapter.limits, self.tracked.speculation.proposer_mask
        if not self.request.computed or not limits.has(NGRAM) or not allowed >> NGRAM & 1:
            return Lookup(np.zeros(1, np.int32), np.full((1, 1), -1, np.int64))
        return self.ngram.lookup([self.request], limits.k_max)

    def _describe(self, lookup: Lookup) -> None:
        row, request, cache = self.tracked, self.request, cache_of(self.kwargs)
        row.context_tokens, row.output_tokens = len(request.tokens), request.output_tokens
        unread = request.pending - cache.get_seq_length()
        row.prefill_tokens = 0 if request.computed else max(unread, 1)
        # k drafts emit up to k + 1 tokens.
        left = self.call.config.max_length - self.ids.shape[1] - 1
        row.room = max(left, 0) if self.can_crop and request.computed else 0
        row.match_tokens = int(lookup.match_tokens[0])
        row.draft_kv_lag = len(request.tokens) - self.draft.computed if self.draft else 0

    def _propose(self, decision: Decision, lookup: Lookup) -> Proposal:
        k, proposer, proposal = int(decision.fit.k[0]), int(decision.fit.proposer[0]), Proposal()
        start_s = time.perf_counter()
        if k and proposer == NGRAM:
            proposal.tokens = [int(t) for t in lookup.tokens[0, :k] if t >= 0]
        elif k and proposer == DRAFT_MODEL and self.draft is not None:
            run: Run = self.draft.draft(self.request.tokens, k, decision.plan, self._guess)
            proposal.tokens, proposal.confidences = run.tokens, run.confidences
            proposal.passes = run.passes
        if k:
            proposal.draft_ms[proposer] = 1e3 * (time.perf_counter() - start_s)
            proposal.drafted = len(proposal.tokens)
            drafted = np.asarray([proposal.drafted], np.int32)
            seen = _row(proposal.confidences)
            del proposal.tokens[int(self.adapter.verify_k(decision, drafted, seen)[0]) :]
        if proposer != NGRAM:
            self.shadow.offer([self.request], lookup, np.ones(1, bool))
        return proposal

    def _guess(self, drafted: list[int], logits: Tensor) -> int:
        ids = torch.cat([self.ids, self._tensor(drafted)], 1)
        return self.chooser.guess(
            ids, logits.to(ids.device), self.request.output_tokens + len(drafted)
        )

    def _prefill(self, drafts: list[int]) -> Any:
        assert not drafts
        outputs = self.model._prefill(self.ids, self.call.config, self.kwargs)
        cache = cache_of(outputs)
        self.can_crop = bool(getattr(cache, "is_croppable", False))
        if self.can_crop and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return outputs

    def _decode(self, drafts: list[int]) -> Any:
        """Run the target over the newest token and the drafts."""
        kwargs, ids, k = self.kwargs, self.ids, len(drafts)
        if k:
            ids = torch.cat([ids, self._tensor(drafts)], 1)
            kwargs = self.model._update_model_kwargs_for_generation(
                {}, dict(kwargs), num_new_tokens=k
            )
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=k + 1, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = k + 1
        return self.model(**inputs, return_dict=True)

    def _accept(self, logits: Tensor, drafts: list[int]) -> tuple[int, int]:
        """Commit tokens up to the first draft that fails; returns drafts verified, and held.

        Those behind the end of the text count as not verified: no processor may be asked of them.
        """
        places = logits[:, -len(drafts) - 1 :].to(device=self.ids.device, dtype=torch.float32)
        best = places[0].argmax(-1).tolist() if self.chooser.is_plain else []
        for place in range(len(drafts) + 1):
            # A copy: processors may write to it, and it must not keep the others alive.
            raw = places[:, place]
            scores = self.chooser.scores(self.ids, raw.clone())
            token = best[place] if best else self.chooser.pick(scores, self.request.output_tokens)
            self._commit(token, scores, raw)
            if place == len(drafts) or token != drafts[place]:
                return len(drafts), place
            if self.done:
                return place + 1, place + 1
        raise AssertionError("the last place has no draft to hold")

    def _commit(self, token: int, scores: Tensor, raw: Tensor) -> None:
        """Append a token and ask the stopping criteria, as plain generate does."""
        config = self.call.config
        self.request.tokens.append(token)
        new = self._tensor([token])
        self.ids = torch.cat([self.ids, new], 1)
        if config.return_dict_in_generate and config.output_scores:
            self.scores.append(scores)
        if config.return_dict_in_generate and config.output_logits:
            self.logits.append(raw.clone())
        if self.call.streamer is not None:
            self.call.streamer.put(new[0].cpu())
        kept = tuple(self.scores) if config.output_scores else None
        self.done = bool(self.call.criteria(self.ids, kept).all())

    def _settle(self, outputs: Any, drafted: int, emitted: int, held: int) -> None:
        """Give back what failed: the cache ends before the newest token, in both models."""
        if self.can_crop:
            cache_of(outputs).crop(-(drafted + 1 - emitted))
        self.request.computed = len(self.request.tokens) - 1
        if self.draft is not None:
            self.draft.keep(min(held, self.request.computed))
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, num_new_tokens=emitted
        )

    def _truncated(self) -> Truncated:
        if not self.done:
            return Truncated.NONE
        length = self.ids.shape[1] >= self.call.config.max_length
        return Truncated.LENGTH if length else Truncated.EOS

    def _output(self) -> Any:
        config = self.call.config
        if not config.return_dict_in_generate:
            return self.ids
        caches = {n: self.kwargs[n] for n in ("cache", "past_key_values") if n in self.kwargs}
        make: Any = GenerateDecoderOnlyOutput
        return make(
            sequences=self.ids,
            scores=tuple(self.scores) if config.output_scores else None,
            logits=tuple(self.logits) if config.output_logits else None,
            **caches,
        )

    def _tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], dtype=self.ids.dtype, device=self.ids.device)


def _without_padding(call: Call) -> list[int]:
    """Return the prompt's token ids that the model is to see."""
    ids, mask = call.input_ids[0], call.kwargs.get("attention_mask")
    kept: list[int] = (ids if mask is None else ids[mask[0, -len(ids) :].bool()]).tolist()
    return kept


def _row(confidences: list[float]) -> Array:
    return np.asarray([confidences or [np.nan]], np.float32)
