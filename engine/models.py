"""A lean Llama over flat ragged batches: fused QKV and gate-up, prepacked weights, no modules.

Target and draft run the same code; a draft may read embeddings of another width through `in_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.attention.paged import Attention, Ragged
from parlay.engine.linear import Linear, can_pack, make_linear
from parlay.engine.model_config import ModelConfig


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights."""

    input_norm: Tensor
    qkv: Linear
    out: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Weights laid out for decoding, on one device in one dtype.

    weights: Hugging Face names; embedding [vocab, width] of what is read (the target's own for a
    draft).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        pack = can_pack(dtype, device)

        def get(name: str) -> Tensor:
            return weights[name].to(device=device, dtype=dtype)

        def linear(*names: str) -> Linear:
            return make_linear(torch.cat([get(f"{name}.weight") for name in names]), pack)

        self.embedding = embedding.to(device=device, dtype=dtype)
        self.in_proj = linear("in_proj") if "in_proj.weight" in weights else None
        self.layers = [
            Layer(
                input_norm=get(f"{at}.input_layernorm.weight"),
                qkv=linear(*(f"{at}.self_attn.{n}_proj" for n in "qkv")),
                out=linear(f"{at}.self_attn.o_proj"),
                ffn_norm=get(f"{at}.post_attention_layernorm.weight"),
                gate_up=linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                down=linear(f"{at}.mlp.down_proj"),
            )
            for at in (f"model.layers.{i}" for i in range(config.layers))
        ]
        self.norm = get("model.norm.weight")
        tied = "lm_head.weight" not in weights
        self.head = make_linear(self.embedding if tied else get("lm_head.weight"), pack)
        self.cos, self.sin = self._rotary()

    def hidden(self, ids: Tensor, ragged: Ragged, attention: Attention) -> Tensor:
        """Return the last layer's normed states [tokens, hidden] of ids i64 [tokens]."""
        c, half = self.config, self.config.head_dim // 2
        x = self.embedding[ids]
        if self.in_proj is not None:
            x = self.in_proj(x)
        cos, sin = self.cos[ragged.positions], self.sin[ragged.positions]
        for index, layer in enumerate(self.layers):
            y = layer.qkv(self._normed(x, layer.input_norm))
            y = y.view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            turned = y[:, : c.heads + c.kv_heads]
            # Half-split rotary: (a, b) -> (a cos - b sin, b cos + a sin); sin holds (-sin, sin).
            turned = turned * cos + torch.cat((turned[..., half:], turned[..., :half]), -1) * sin
            kv = torch.cat((turned[:, c.heads :], y[:, c.heads + c.kv_heads :]), 1)
            mixed = attention(index, turned[:, : c.heads], kv, ragged)
            x = x + layer.out(mixed.reshape(-1, c.heads * c.head_dim))
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return self._normed(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, head rows] logits of normed states."""
        return self.head(hidden)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _rotary(self) -> tuple[Tensor, Tensor]:
        c = self.config
        steps = torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim
        angles = torch.outer(torch.arange(c.context, dtype=torch.float32), c.rope_theta**-steps)
        cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
        sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
        return (cos.to(self.device, self.dtype), sin.to(self.device, self.dtype))
