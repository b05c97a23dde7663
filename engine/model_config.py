"""The shape of a Llama model, read from a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "LlamaForCausalLM"
MAX_CONTEXT = 1 << 24
"""Longest context believed: tables of positions are made for all of it."""
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Sizes of a decoder-only Llama model.

    context: the most positions it was made for; tied: the output layer is the embedding; eos_ids:
    tokens that end a text (empty: none); state_layers: of a draft, the target's layers whose states
    it reads, ascending from 1. Raises ValueError where the sizes do not fit each other.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    norm_eps: float
    context: int
    tied: bool
    eos_ids: tuple[int, ...]
    state_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model config: {name} must be at least 1, not {getattr(self, name)}"
                )
        if self.context > MAX_CONTEXT:
            raise ValueError(
                f"model config: context must be at most {MAX_CONTEXT}, not {self.context}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model config: {self.heads} heads cannot share {self.kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim must be even, not {self.head_dim}")
        if list(self.state_layers) != sorted({layer for layer in self.state_layers if layer > 0}):
            raise ValueError(
                f"model config: state_layers must ascend from 1 or more, not {self.state_layers}"
            )
        for eos in self.eos_ids:
            if not 0 <= eos < self.vocab:
                raise ValueError(
                    f"model config: end token {eos} is not in the vocabulary of {self.vocab}"
                )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of the model, as Hugging Face names them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes[f"{at}.input_layernorm.weight"] = (self.hidden,)
            shapes[f"{at}.post_attention_layernorm.weight"] = (self.hidden,)
            shapes[f"{at}.self_attn.q_proj.weight"] = (q, self.hidden)
            shapes[f"{at}.self_attn.k_proj.weight"] = (kv, self.hidden)
            shapes[f"{at}.self_attn.v_proj.weight"] = (kv, self.hidden)
            shapes[f"{at}.self_attn.o_proj.weight"] = (self.hidden, q)
            shapes[f"{at}.mlp.gate_proj.weight"] = (self.ffn, self.hidden)
            shapes[f"{at}.mlp.up_proj.weight"] = (self.ffn, self.hidden)
            shapes[f"{at}.mlp.down_proj.weight"] = (self.hidden, self.ffn)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json; raises ValueError naming what is missing or not supported."""
    _refuse_unsupported(config)
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    if heads < 1 or (config.get("head_dim") is None and hidden % heads):
        raise ValueError(f"model config: hidden_size {hidden} is not a multiple of {heads} heads")
    return ModelConfig(
        hidden=hidden,
        layers=_whole(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=_whole(config, "head_dim", hidden // heads),
        ffn=_whole(config, "intermediate_size"),
        vocab=_whole(config, "vocab_size"),
        rope_theta=_rope_theta(config),
        norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps") or 1e-6),
        context=_whole(config, "max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=token_ids(config.get("eos_token_id")),
    )


def load_config(path: str | Path) -> ModelConfig:
    """Read a checkpoint's sizes; end tokens of generation_config.json win, as in `generate`."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"no model at {folder}: it must be a folder with config.json and safetensors"
        )
    try:
        config = from_hf(read_json(folder / "config.json"))
        if (folder / "generation_config.json").exists():
            generation = read_json(folder / "generation_config.json")
            if generation.get("eos_token_id") is not None:
                config = dataclasses.replace(config, eos_ids=token_ids(generation["eos_token_id"]))
    except ValueError as error:
        raise ValueError(f"cannot load the model at {folder}: {error}") from None
    return config


def token_ids(value: Any) -> tuple[int, ...]:
    """Read a token id that Hugging Face writes as null, a number or a list."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise ValueError(
            f"model config: eos_token_id must be a whole number or a list, not {value!r}"
        )
    return tuple(ids)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raises ValueError in one line where it is missing or is none."""
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} is not a JSON object")
    return parsed


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    if named != [ARCHITECTURE]:
        found = ", ".join(map(str, named)) or f"model_type {config.get('model_type', 'unknown')}"
        raise ValueError(f"architecture {found} is not supported; supported: {ARCHITECTURE}")
    for key, allowed in _MUST_BE.items():
        value = config.get(key)
        if value not in allowed:
            shown = "set" if isinstance(value, Mapping) else repr(value)
            raise ValueError(
                f"model config: {key} {shown} is not supported; it must be {allowed[0]!r}"
            )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Accept rope_parameters (transformers 5) and rope_theta with rope_scaling (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"model config: rope_parameters must be an object, not {rope!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"model config: rope scaling '{kind}' is not supported; only 'default' is")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("model config: partial_rotary_factor is not supported; it must be 1.0")
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return _positive("rope_theta", theta)


def _positive(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 < value < math.inf:
        raise ValueError(f"model config: {key} must be a number above 0, not {value!r}")
    return float(value)


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int:
        what = "is missing" if value is None else f"must be a whole number, not {value!r}"
        raise ValueError(f"model config: {key} {what}")
    return value
