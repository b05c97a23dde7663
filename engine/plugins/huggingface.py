"""Hugging Face transformers: `generate` that decides at every step who drafts how many tokens.

`model.generate(ids, custom_generate=parlay_generate)` for one call, `install(model)` for all of
them. Output is that of plain generate: see `hf_choose.py` for why, `hf_plain.py` for what is left
to plain generate.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from parlay.engine.planner import Planner
from parlay.engine.plugins.adapter import Adapter
from parlay.engine.plugins.counters import Counters
from parlay.engine.plugins.hf_decode import Call, Decoding
from parlay.engine.plugins.hf_draft import check_draft
from parlay.engine.plugins.hf_plain import plain, why_plain
from parlay.engine.plugins.hints import speculation_of
from parlay.engine.plugins.settings import read_settings, sparing_planner
from parlay.engine.proposers.ngram import NgramProposer
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Proposer

__all__ = ["Speculator", "install", "parlay_generate", "uninstall"]

K_MAX = 16
log = logging.getLogger("parlay.plugin")
_speculators: weakref.WeakKeyDictionary[Any, dict[int, Speculator]] = weakref.WeakKeyDictionary()
_ORDINARY = "_parlay_ordinary_generate"


class Speculator:
    """What learns from one call of generate to the next: a policy, and who drafts.

    model: whose texts are decoded. draft_model: a model of the same vocabulary, or None. policy,
    values and sidecar as in `read_settings`; planner decides instead of them. Raises ValueError
    where the draft model does not fit or a setting makes no sense.
    """

    def __init__(
        self,
        model: Any,
        draft_model: Any = None,
        policy: str | None = None,
        values: Mapping[str, Any] | None = None,
        sidecar: str | None = None,
        planner: Planner | None = None,
    ) -> None:
        if draft_model is not None:
            check_draft(model, draft_model)
        mask = 1 << Proposer.NONE | 1 << Proposer.NGRAM
        mask |= (draft_model is not None) << Proposer.DRAFT_MODEL
        self.draft_model = draft_model
        limits, settings = EngineLimits(mask, K_MAX), read_settings(policy, values, sidecar)
        planner = planner or sparing_planner(settings, "huggingface", limits)
        self.adapter = Adapter("huggingface", limits, planner=planner)
        self.ngram = NgramProposer()

    @property
    def counters(self) -> Counters:
        """Return what was done so far."""
        return self.adapter.counters

    def decode(self, call: Call, hints: Mapping[str, Any] | None) -> Any:
        """Decode one call, with drafts where that can be done."""
        reason = why_plain(call.model, call.input_ids, call.config, call.kwargs)
        if reason is not None:
            self.adapter.fallback(reason)
            lists = {"logits_processor": call.processors, "stopping_criteria": call.criteria}
            ids, config, streamer = call.input_ids, call.config, call.streamer
            return plain(call.model, ids, config, streamer, call.kwargs, **lists)
        tracked = self.adapter.add(speculation_of(hints))
        try:
            return Decoding(self.adapter, tracked, self.ngram, self.draft_model, call).run()
        finally:
            self.adapter.forget(tracked)

    def close(self) -> None:
        """Let go of a sidecar."""
        self.adapter.close()


def parlay_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    speculator: Speculator | None = None,
    draft_model: Any = None,
    token_streamer: Any = None,
    hints: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode in generate's stead; for `custom_generate`, which hands on our own keywords only.

    speculator: None takes the model's own one, made at its first call. draft_model: for that one,
    where none is given. token_streamer: a streamer (generate drops `streamer` beside
    `custom_generate`). hints: as in `speculation_of`. Returns what generate returns; raises
    ValueError where the draft model or a hint makes no sense.
    """
    if speculator is None:
        speculator = _speculator_of(model, draft_model)
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    call = Call(
        model, input_ids, logits_processor, stopping_criteria, generation_config, token_streamer,
        model_kwargs,
    )  # fmt: skip
    with torch.no_grad():
        return speculator.decode(call, hints)


def install(model: Any, draft_model: Any = None, **settings: Any) -> Speculator:
    """Make every `model.generate` speculate; returns what decides. `uninstall` undoes it.

    settings: as of Speculator. `streamer`, `stop_strings` and `assistant_model` mean what they
    always do; calls that name a `custom_generate` of their own are left alone.
    """
    uninstall(model)
    speculator = Speculator(model, draft_model, **settings)
    ordinary = model.generate
    signature = inspect.signature(ordinary)

    @functools.wraps(ordinary)
    def generate(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        if not _ours(given, model.generation_config):
            if given.get("custom_generate") is None:
                speculator.adapter.fallback("a keyword of this call's is not speculated")
                kwargs.pop("hints", None)
            return ordinary(*args, **kwargs)
        return ordinary(**_translated(model, speculator, given))

    setattr(generate, _ORDINARY, ordinary)
    model.generate = generate
    return speculator


def uninstall(model: Any) -> None:
    """Give a model its ordinary generate back."""
    if hasattr(model.generate, _ORDINARY):
        del model.generate


def _ours(given: Mapping[str, Any], config: Any) -> bool:
    """Say whether a call is one that can be handed to `parlay_generate`; config: the model's."""
    others = (
        "custom_generate", "trust_remote_code", "assistant_tokenizer", "cache_implementation",
        "token_healing",
    )  # fmt: skip
    configs = [c for c in (given.get("generation_config"), config) if c is not None]
    tokenizer_needed = any(c.stop_strings is not None or c.token_healing for c in configs)
    return all(given.get(n) is None for n in others) and not tokenizer_needed


def _translated(model: Any, speculator: Speculator, given: dict[str, Any]) -> dict[str, Any]:
    """Return generate's arguments in the words of `parlay_generate`."""
    assistant, tokenizer = given.pop("assistant_model", None), given.pop("tokenizer", None)
    if assistant is not None and assistant is not speculator.draft_model:
        speculator = _speculator_of(model, assistant)
    stop = given.pop("stop_strings", None)
    if stop is not None:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: pass tokenizer= as well")
        criteria = StoppingCriteriaList(given.get("stopping_criteria") or [])
        given["stopping_criteria"] = [*criteria, StopStringCriteria(tokenizer, stop)]
    given["token_streamer"] = given.pop("streamer", None)
    return {**given, "custom_generate": parlay_generate, "speculator": speculator}


def _speculator_of(model: Any, draft_model: Any) -> Speculator:
    """Return the model's own speculator with this draft model, made at the first call."""
    mine = _speculators.setdefault(model, {})
    # A speculator holds on to its draft model: no other one gets the same id.
    if id(draft_model) not in mine:
        mine[id(draft_model)] = Speculator(model, draft_model)
    return mine[id(draft_model)]
