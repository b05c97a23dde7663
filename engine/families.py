"""The architectures that are supported, and their traits as a Hugging Face config.json tells them.

What each asks of the forward: Qwen2 (arXiv 2407.10671), Qwen3 (2505.09388), Gemma 3 (2503.19786).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parlay.engine.traits import LLAMA, Local, Traits

Config = Mapping[str, Any]

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_GEMMA_PERIOD = 6
"""Of so many layers the last one sees everything, where config.json does not list them."""
_NOWHERE: Mapping[str, tuple[Any, ...]] = {
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}


@dataclass(slots=True, frozen=True)
class Family:
    """One architecture.

    must_be: values of config.json that others than these are refused for. tied, rope_theta: what
    holds where it is silent. traits: reads them; raises ValueError.
    """

    must_be: Mapping[str, tuple[Any, ...]]
    tied: bool
    rope_theta: float
    traits: Callable[[Config], Traits]


def family_of(config: Config) -> Family:
    """Find the family of a parsed config.json; raises ValueError for what is not supported."""
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    if len(named) != 1 or not isinstance(named[0], str) or named[0] not in FAMILIES:
        found = ", ".join(map(str, named)) or f"model_type {config.get('model_type', 'unknown')}"
        raise ValueError(
            f"architecture {found} is not supported; supported: {', '.join(FAMILIES)}"
            " (text only, dense, not quantized)"
        )
    family = FAMILIES[named[0]]
    for key, allowed in {**_NOWHERE, **family.must_be}.items():
        value = config.get(key)
        if value not in allowed:
            shown = "set" if isinstance(value, Mapping) else repr(value)
            raise ValueError(
                f"model config: {key} {shown} is not supported; it must be {allowed[0]!r}"
            )
    return family


def rope_theta(
    config: Config, default: float, kind: str = _GLOBAL, key: str = "rope_theta"
) -> float:
    """Return the base of a kind of layer's rotary angles; raises ValueError where they are scaled.

    Reads rope_parameters (transformers 5), by kind of layer or for all, and `key` with rope_scaling
    (before).
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, Mapping):
        rope = rope.get(kind) or rope
    if not isinstance(rope, Mapping):
        raise ValueError(f"model config: rope_parameters must be an object, not {rope!r}")
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    if scaling != "default":
        raise ValueError(
            f"model config: rope scaling '{scaling}' is not supported; only 'default' is"
        )
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("model config: partial_rotary_factor is not supported; it must be 1.0")
    return positive(key, first(rope.get("rope_theta"), config.get(key), default))


def first(*values: Any) -> Any:
    """Return the first value that is not null, as a setting of 0 is still one."""
    return next(value for value in values if value is not None)


def positive(key: str, value: Any) -> float:
    """Return a finite number above 0; raises ValueError for anything else."""
    if type(value) not in (int, float) or not 0.0 < value <= sys.float_info.max:
        raise ValueError(f"model config: {key} must be a number above 0, not {value!r}")
    return float(value)


def whole(config: Config, key: str, default: int | None = None) -> int:
    """Return a whole number; raises ValueError where it is none, or missing without default."""
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int:
        what = "is missing" if value is None else f"must be a whole number, not {value!r}"
        raise ValueError(f"model config: {key} {what}")
    return value


def _qwen2(config: Config) -> Traits:
    return Traits(qkv_bias=True, local=_qwen_local(config))


def _qwen3(config: Config) -> Traits:
    return Traits(qk_norm=True, local=_qwen_local(config))


def _gemma3(config: Config) -> Traits:
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and not (_GLOBAL in rope and _LOCAL in rope):
        raise ValueError(f"model config: rope_parameters must tell {_GLOBAL} and {_LOCAL} apart")
    period = whole(config, "sliding_window_pattern", _GEMMA_PERIOD)
    layers = range(1, whole(config, "num_hidden_layers") + 1)
    local = _kinds(config, tuple(period < 1 or bool(i % period) for i in layers))
    scalar = positive("query_pre_attn_scalar", config.get("query_pre_attn_scalar") or 256)
    theta = rope_theta(config, 10000.0, _LOCAL, "rope_local_base_freq")
    return Traits(
        qk_norm=True,
        query_scale=math.sqrt(_head_dim(config) / scalar),
        post_norms=True,
        norm_plus_one=True,
        gelu=True,
        scaled_embedding=True,
        local=Local(local, whole(config, "sliding_window", 4096), theta) if any(local) else None,
    )


def _qwen_local(config: Config) -> Local | None:
    """Return the layers with a window, which Qwen's switch off for all as a rule."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        if any(_kinds(config, ())):
            raise ValueError(
                f"model config: layer_types says {_LOCAL}, but use_sliding_window is off"
            )
        return None
    first = whole(config, "max_window_layers", 28)
    local = _kinds(config, tuple(i >= first for i in range(whole(config, "num_hidden_layers"))))
    window = whole(config, "sliding_window")
    return Local(local, window, rope_theta(config, 10000.0, _LOCAL)) if any(local) else None


def _kinds(config: Config, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which layers are local: as layer_types lists them, else the default."""
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or any(kind not in (_GLOBAL, _LOCAL) for kind in kinds):
        raise ValueError(
            f"model config: layer_types must list {_GLOBAL} or {_LOCAL} a layer, not {kinds!r}"
        )
    return tuple(kind == _LOCAL for kind in kinds)


def _head_dim(config: Config) -> int:
    heads = max(whole(config, "num_attention_heads"), 1)
    return whole(config, "head_dim", whole(config, "hidden_size") // heads)


_SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", None)}
_NO_BIAS: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False, None)}
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        {**_SILU, **_NO_BIAS, "sliding_window": (None,)}, False, 10000.0, lambda _: LLAMA
    ),
    "Qwen2ForCausalLM": Family(_SILU, False, 10000.0, _qwen2),
    "Qwen3ForCausalLM": Family({**_SILU, **_NO_BIAS}, False, 10000.0, _qwen3),
    "Gemma3ForCausalLM": Family(
        {
            **_NO_BIAS,
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "final_logit_softcapping": (None,),
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        True,
        1000000.0,
        _gemma3,
    ),
}
