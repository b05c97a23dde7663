"""The shape of a decoder-only model, read from a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.engine.families import family_of, first, positive, rope_theta, whole
from parlay.engine.traits import LLAMA, Traits

MAX_CONTEXT = 1 << 24
"""Longest context believed: tables of positions are made for all of it."""
MAX_LAYERS = 1 << 12
"""Most layers believed: each one's tensors are named before any is looked for."""
_ODD = (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError)


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Sizes of a decoder-only model, and what it has beyond a Llama.

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
    traits: Traits = LLAMA

    def __post_init__(self) -> None:
        sizes = ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")
        for name in sizes:
            value = getattr(self, name)
            if type(value) is not int:
                raise ValueError(f"model config: {name} must be a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"model config: {name} must be at least 1, not {value}")
        positive("rope_theta", self.rope_theta)
        positive("norm_eps", self.norm_eps)
        check_layers(self.layers)
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
        if not all(type(i) is int for i in (*self.state_layers, *self.eos_ids)):
            raise ValueError("model config: state_layers and eos_ids must be whole numbers")
        if list(self.state_layers) != sorted({layer for layer in self.state_layers if layer > 0}):
            raise ValueError(
                f"model config: state_layers must ascend from 1 or more, not {self.state_layers}"
            )
        for eos in self.eos_ids:
            if not 0 <= eos < self.vocab:
                raise ValueError(
                    f"model config: end token {eos} is not in the vocabulary of {self.vocab}"
                )
        local = self.traits.local
        if local is not None and (len(local.layers) != self.layers or local.window < 1):
            raise ValueError(
                f"model config: {len(local.layers)} layer_types and a sliding_window of"
                f" {local.window} do not fit {self.layers} layers"
            )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of the model, as Hugging Face names them."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            own = self._layer_shapes()
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.traits.post_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (self.hidden,) for name in norms}
        shapes |= {
            "self_attn.q_proj.weight": (q, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q),
            "mlp.gate_proj.weight": (self.ffn, self.hidden),
            "mlp.up_proj.weight": (self.ffn, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.ffn),
        }
        if self.traits.qkv_bias:
            shapes |= {f"self_attn.{n}_proj.bias": (q if n == "q" else kv,) for n in "qkv"}
        if self.traits.qk_norm:
            shapes |= {f"self_attn.{n}_norm.weight": (self.head_dim,) for n in "qk"}
        return shapes


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json; raises ValueError naming what is missing or not supported."""
    family = family_of(config)
    layers = whole(config, "num_hidden_layers")
    check_layers(layers)
    heads = whole(config, "num_attention_heads")
    hidden = whole(config, "hidden_size")
    if heads < 1 or (config.get("head_dim") is None and hidden % heads):
        raise ValueError(f"model config: hidden_size {hidden} is not a multiple of {heads} heads")
    return ModelConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=whole(config, "num_key_value_heads", heads),
        head_dim=whole(config, "head_dim", hidden // heads),
        ffn=whole(config, "intermediate_size"),
        vocab=whole(config, "vocab_size"),
        rope_theta=rope_theta(config, family.rope_theta),
        norm_eps=positive("rms_norm_eps", first(config.get("rms_norm_eps"), 1e-6)),
        context=whole(config, "max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        eos_ids=token_ids(config.get("eos_token_id")),
        traits=family.traits(config),
    )


def check_layers(layers: int) -> None:
    """Raise ValueError for more layers than any model has."""
    if layers > MAX_LAYERS:
        raise ValueError(f"model config: layers must be at most {MAX_LAYERS}, not {layers}")


@contextmanager
def reading(what: str, mend: str) -> Iterator[None]:
    """Turn what Python raises over a file's odd content into a ValueError of one line."""
    try:
        yield
    except _ODD as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{what} is damaged ({said}); {mend}") from None


def load_config(path: str | Path) -> ModelConfig:
    """Read a checkpoint's sizes; end tokens of generation_config.json win, as in `generate`."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"no model at {folder}: it must be a folder with config.json and safetensors"
        )
    try:
        with reading(f"{folder / 'config.json'}", "download the checkpoint again"):
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
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read: {error}; it must be one JSON object in UTF-8"
        ) from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} is not a JSON object")
    return parsed
