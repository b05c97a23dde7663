"""The weights of a decoder layer, laid out for decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.engine.linear import Linear, can_pack, make_linear, tiled
from parlay.engine.model_config import ModelConfig


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights.

    qk_norm [heads + kv_heads, head_dim], out_norm and down_norm (of what attention and feed-forward
    add) are there where the model has such norms. reach: which of `Llama.reaches` is the layer's.
    """

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    out_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    down_norm: Tensor | None
    reach: int


class Loader:
    """Reads weights by Hugging Face's names and lays them out.

    invariant: linears give a row the same bits in every batch; see `tiled`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool = False,
    ) -> None:
        self.config, self.weights, self.dtype, self.device = config, weights, dtype, device
        self.pack, self.invariant = can_pack(dtype, device), invariant

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """Join the rows of several linears, with their biases where they have them."""

        def joined(part: str) -> Tensor:
            found = [self.weights[f"{name}.{part}"] for name in names]
            return torch.cat([w.to(self.device, self.dtype) for w in found])

        return self.made(joined("weight"), joined("bias") if bias else None)

    def made(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the linear of a weight [out, in] that is where and as it should be."""
        linear = make_linear(weight, self.pack, bias)
        if not self.invariant:
            return linear
        return tiled(linear, weight.shape[1], self.dtype, self.device)

    def norm(self, name: str) -> Tensor:
        """Return a norm's scale; in float32 where 1 is added, which would not fit bfloat16."""
        weight = self.weights[f"{name}.weight"].to(self.device)
        return 1.0 + weight.float() if self.config.traits.norm_plus_one else weight.to(self.dtype)

    def qk_norm(self, at: str) -> Tensor:
        """Return the scale of each head's query and key, the queries' own factor in it."""
        c = self.config
        q, k = (self.norm(f"{at}.{n}_norm") for n in "qk")
        return torch.stack([q * c.traits.query_scale] * c.heads + [k] * c.kv_heads)

    def layer(self, index: int) -> Layer:
        """Return a layer's weights."""
        at, traits = f"model.layers.{index}", self.config.traits
        # Behind attention Llama norms the sum, which the feed-forward reads; others what is added.
        before, behind = f"{at}.pre_feedforward_layernorm", f"{at}.post_attention_layernorm"
        post = traits.post_norms
        return Layer(
            input_norm=self.norm(f"{at}.input_layernorm"),
            qkv=self.linear(*(f"{at}.self_attn.{n}_proj" for n in "qkv"), bias=traits.qkv_bias),
            qk_norm=self.qk_norm(f"{at}.self_attn") if traits.qk_norm else None,
            out=self.linear(f"{at}.self_attn.o_proj"),
            out_norm=self.norm(behind) if post else None,
            ffn_norm=self.norm(before if post else behind),
            gate_up=self.linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
            down=self.linear(f"{at}.mlp.down_proj"),
            down_norm=self.norm(f"{at}.post_feedforward_layernorm") if post else None,
            reach=int(traits.local is not None and traits.local.layers[index]),
        )
