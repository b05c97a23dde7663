"""A lean Llama over flat ragged batches: fused QKV and gate-up, prepacked weights, no modules.

Target and draft run the same code; a draft may read embeddings of another width through `in_proj`,
and the target's states through `state_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.attention.paged import PagedKV, plan_ragged
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.linear import Linear, can_pack, make_linear
from parlay.engine.model_config import ModelConfig
from parlay.engine.rotary import rotary_angles
from parlay.engine.spans import Spans

STATE_EPS = 1e-6
"""Added to the mean square of a tapped state where it is normed."""


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
        self.state_proj = linear("state_proj") if "state_proj.weight" in weights else None
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

    def new_cache(self, blocks: int, block_tokens: int) -> SdpaAttention:
        """Return an empty paged cache with the attention over it."""
        c = self.config
        cache = PagedKV(c, blocks, block_tokens, self.dtype, self.device)
        return SdpaAttention(cache, c.heads)

    def embed(self, ids: Tensor, states: Tensor | None = None) -> Tensor:
        """Return the input of tokens; see `Model.embed`."""
        x = self.embedding[ids]
        if self.in_proj is not None:
            x = self.in_proj(x)
        if states is not None:
            assert self.state_proj is not None, "this model reads no states"
            x = x + self.state_proj(states)
        return x

    def run(
        self, x: Tensor, cache: SdpaAttention, spans: Spans, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run every layer; see `Model.run`."""
        c, half = self.config, self.config.head_dim // 2
        share = c.heads // c.kv_heads
        ragged = plan_ragged(cache.cache, spans.tables, spans.starts, spans.lengths, share)
        tapped: list[Tensor] = []
        cos, sin = self.cos[ragged.positions], self.sin[ragged.positions]
        for index, layer in enumerate(self.layers):
            y = layer.qkv(self._normed(x, layer.input_norm))
            y = y.view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            turned = y[:, : c.heads + c.kv_heads]
            # Half-split rotary: (a, b) -> (a cos - b sin, b cos + a sin); sin holds (-sin, sin).
            turned = turned * cos + torch.cat((turned[..., half:], turned[..., :half]), -1) * sin
            kv = torch.cat((turned[:, c.heads :], y[:, c.heads + c.kv_heads :]), 1)
            mixed = cache(index, turned[:, : c.heads], kv, ragged)
            x = x + layer.out(mixed.reshape(-1, c.heads * c.head_dim))
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if index + 1 in taps and index + 1 < c.layers:
                tapped.append(F.rms_norm(x, (c.hidden,), eps=STATE_EPS))
        normed = self._normed(x, self.norm)
        if c.layers in taps:
            tapped.append(normed)
        return normed, torch.cat(tapped, 1) if tapped else normed[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, head rows] logits of normed states."""
        return self.head(hidden)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _rotary(self) -> tuple[Tensor, Tensor]:
        angles = rotary_angles(self.config, self.config.context)
        cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
        sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
        return (cos.to(self.device, self.dtype), sin.to(self.device, self.dtype))
