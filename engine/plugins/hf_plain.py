"""When Hugging Face's generate is left to its own ways, and how.

Speculation is for one text at a time, decoded token by token by a decoder-only model whose cache
can be cropped. Everything else is decoded as if parlay were not there.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils as _utils
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

ONE_BY_ONE = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
library: Any = _utils
_STEPS = ("_prefill", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation")


def why_plain(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why this call cannot speculate, in a few words that do not name its values, or None.

    config and kwargs: generation config and model kwargs as generate has prepared them.
    """
    mode = config.get_generation_mode()
    hidden = config.return_dict_in_generate and (
        config.output_attentions or config.output_hidden_states
    )
    reasons = {
        f"{mode.value.replace('_', ' ')} is not speculated": mode not in ONE_BY_ONE,
        "a batch of several texts is not speculated": input_ids.shape[0] != 1,
        "an encoder-decoder model is not speculated": model.config.is_encoder_decoder,
        "a call without prompt ids is not speculated": kwargs.get("inputs_embeds") is not None
        or input_ids.shape[1] == 0,
        "a model in several processes is not speculated": _processes() > 1,
        "token types are not speculated": kwargs.get("token_type_ids") is not None,
        "attentions and hidden states are not kept by drafts": bool(hidden),
        "an assistant's own text is not speculated": bool(config.is_assistant),
        "this transformers or model decodes by other steps": not _usual_steps(model),
    }
    return next((reason for reason, holds in reasons.items() if holds), _why_cache(model, kwargs))


def cache_of(holder: Any) -> Any:
    """Return the KV cache among a call's kwargs or a model's outputs; older versions' name too."""
    # The new name first, and the old one only then: asking for it draws a warning.
    return holder["cache"] if "cache" in holder else holder.get("past_key_values")


def plain(
    model: Any, input_ids: Tensor, config: Any, streamer: Any, kwargs: dict[str, Any], **lists: Any
) -> Any:
    """Decode as generate itself would have; raises ValueError for what needs another repository.

    lists: logits_processor and stopping_criteria. kwargs: of the model.
    """
    mode = config.get_generation_mode()
    if mode not in ONE_BY_ONE + _BEAMS:
        raise ValueError(f"{mode.value} cannot be had with parlay: call generate without it")
    if mode in _BEAMS and streamer is not None:
        raise ValueError("beam search cannot stream: leave out the streamer, or set num_beams=1")
    if mode not in _BEAMS:
        lists["streamer"] = streamer
    decode = type(model)._beam_search if mode in _BEAMS else type(model)._sample
    sharded = library.is_deepspeed_zero3_enabled() or library.is_fsdp_managed_module(model)
    synced = sharded and _processes() > 1
    return decode(model, input_ids, generation_config=config, synced_gpus=synced, **lists, **kwargs)


def _why_cache(model: Any, kwargs: dict[str, Any]) -> str | None:
    cache = cache_of(kwargs)
    if cache is None or not kwargs.get("use_cache", True):
        return "a call without a KV cache is not speculated"
    if getattr(cache, "is_compileable", False):
        return "a static cache is not speculated"
    if getattr(model, "_is_stateful", False):
        return "a model with a state that cannot go back is not speculated"
    return None


def _usual_steps(model: Any) -> bool:
    """Say whether the model's bookkeeping between steps is the library's, as this file knows it."""
    kind = type(model)
    if not all(hasattr(kind, name) for name in _STEPS):
        return False
    prepare = inspect.signature(kind.prepare_inputs_for_generation).parameters
    update = "_update_model_kwargs_for_generation"
    return (
        "next_sequence_length" in prepare
        and "num_new_tokens" in inspect.signature(getattr(kind, update)).parameters
        and getattr(kind, update) is getattr(GenerationMixin, update)
    )


def _processes() -> int:
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if spread else 1
