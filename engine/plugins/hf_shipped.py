"""The shipped draft model as a Hugging Face model, to draft for the default model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from parlay.engine.draft_format import load_draft
from parlay.engine.model_config import ModelConfig

_FLOOR = -1e4
"""The logit of a token that the trimmed head does not know."""


class TrimmedHead(nn.Module):
    """A head for some tokens of the vocabulary; the others are never likely."""

    def __init__(self, weight: Tensor, ids: Tensor, vocab: int) -> None:
        super().__init__()
        self.weight, self.vocab = nn.Parameter(weight, requires_grad=False), vocab
        self.ids = nn.Parameter(ids, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] of hidden [..., width]."""
        # A slice of the last few of many places takes ten times as long in torch's linear.
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = hidden.new_full((len(flat), self.vocab), _FLOOR)
        logits[:, self.ids] = nn.functional.linear(flat, self.weight)
        return logits.view(*hidden.shape[:-1], self.vocab)


def shipped_draft(model: Any, path: Path | None = None) -> Any:
    """Return the draft at `path` (None: the shipped one) for `model`, in its dtype and device.

    The two share the embedding. Raises ValueError where the draft was made for another model.
    """
    embedding = model.get_input_embeddings().weight
    file = path or Path(str(resources.files("parlay.engine") / "data/smollm2_draft.safetensors"))
    config, weights, ids = load_draft(file, embedding)
    # transformers keeps the target's states to itself; without them a draft guesses less well.
    weights.pop("state_proj.weight", None)
    with torch.device("meta"):
        draft = LlamaForCausalLM(_llama_config(config, len(embedding)))
    draft.lm_head = TrimmedHead(weights.pop("lm_head.weight"), ids, len(embedding))
    draft.model.rotary_emb = type(draft.model.rotary_emb)(draft.config)
    state = {name: w.to(embedding.dtype) for name, w in weights.items()}
    missing, extra = draft.load_state_dict(state, strict=False, assign=True)
    assert not extra
    assert all(name.startswith(("lm_head", "model.embed")) for name in missing)
    draft.lm_head.to(embedding.dtype)
    draft.set_input_embeddings(model.get_input_embeddings())
    draft.generation_config.eos_token_id = model.generation_config.eos_token_id
    return draft.eval().requires_grad_(False).to(embedding.device)


def _llama_config(config: ModelConfig, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
    )
