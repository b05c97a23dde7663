"""Tiny Hugging Face Llamas with random weights, and a draft that is often right."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 40
EOS = 3


def tiny_pair(vocab: int = VOCAB, noise: float = 0.03, **config: Any) -> tuple[Any, Any]:
    """Return a model and a draft for it: the same weights, blurred by `noise`."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(LlamaForCausalLM(_config(vocab, **config)).eval())
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.add_(torch.randn_like(weight) * noise)
    return models[0], models[1]


def _config(vocab: int, **config: Any) -> LlamaConfig:
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab,
        "max_position_embeddings": 256, "initializer_range": 0.5,
        "eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **config})
