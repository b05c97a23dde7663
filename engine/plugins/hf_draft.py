"""A Hugging Face model that drafts for another of the same vocabulary, one pass a token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from parlay.engine.plugins.hf_plain import cache_of
from parlay.engine.proposers.confidence import estimate, keeps_drafting
from parlay.policies.types import Plan, Proposer, StopKind, StopRule

Choose = Callable[[list[int], Tensor], int]
"""Picks a token: (drafts so far, logits [1, vocab]) -> id."""


@dataclass(slots=True)
class Run:
    """Drafted tokens, and each place's largest probability, also of one at which it stopped."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    passes: int = 0


class DraftReader:
    """What a draft model has read of one text, in a KV cache of its own."""

    def __init__(self, model: Any) -> None:
        self.model, self.computed = model, 0
        cache = DynamicCache(config=model.config)
        named = "past_key_values" in inspect.signature(model.forward).parameters
        # Beyond it a model may have no positions at all.
        self._most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._kwargs = {"past_key_values" if named else "cache": cache, "use_cache": True}
        if model._supports_logits_to_keep():
            self._kwargs["logits_to_keep"] = 1

    def draft(self, text: list[int], k: int, plan: Plan | None, choose: Choose) -> Run:
        """Read what of `text` is unread, then draft up to k tokens; the plan may stop it early.

        A text that outgrows the model's positions is not drafted for.
        """
        run, reach = Run(), np.ones(1)
        if self._most is not None:
            k = min(k, self._most - len(text) + 1)
        stop = plan.stop_rule if plan else StopRule()
        for place in range(k):
            logits = self._read(text + run.tokens)
            run.passes += 1
            law = torch.softmax(logits[0].float(), -1)
            peak = float(law.max())
            run.confidences.append(peak)
            reach *= estimate(plan, Proposer.DRAFT_MODEL, place, np.asarray([peak]))
            if not keeps_drafting(stop, reach, logits, place)[0]:
                break
            run.tokens.append(choose(run.tokens, logits))
            # The token that falls below the threshold is kept; drafting ends behind it.
            if stop.kind is StopKind.PROBABILITY and float(law[run.tokens[-1]]) < stop.threshold:
                break
        return run

    def keep(self, tokens: int) -> None:
        """Forget what was read beyond the first `tokens` of the text."""
        if (beyond := self.computed - tokens) > 0:
            cache_of(self._kwargs).crop(-beyond)
            self.computed = tokens

    def _read(self, text: list[int]) -> Tensor:
        """Return logits [1, vocab] behind `text`."""
        unread = torch.tensor([text[self.computed :]], device=self.model.device)
        at = torch.arange(self.computed, len(text), device=self.model.device)[None]
        out = self.model(input_ids=unread, position_ids=at, return_dict=True, **self._kwargs)
        if self.computed == 0 and hasattr(cache_of(self._kwargs), "activate_past_recording"):
            cache_of(self._kwargs).activate_past_recording()
        self.computed = len(text)
        logits: Tensor = out.logits[:, -1]
        return logits


def check_draft(model: Any, draft: Any) -> None:
    """Raise ValueError where `draft` cannot draft for `model`."""
    mine, its = (m.config.get_text_config().vocab_size for m in (model, draft))
    if mine != its:
        raise ValueError(
            f"the draft model has {its} tokens, the model {mine}: a draft needs the same tokenizer"
        )
    if draft.config.is_encoder_decoder:
        raise ValueError("the draft model must be decoder-only")
