"""A plain Llama for training and for teaching: whole right-padded sequences, no cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parlay.engine.model_config import ModelConfig
from parlay.engine.rotary import rotary_angles
from parlay.engine.traits import LLAMA


def require_llama(config: ModelConfig) -> None:
    """Raise ValueError for a model that is more than a plain Llama."""
    if config.traits != LLAMA:
        raise ValueError("parlay distill works with Llama targets only, so far")


def rotary(config: ModelConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, head_dim], half-split as in Hugging Face's Llama."""
    angles = rotary_angles(config, length)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., head_dim] turned by the angles of its positions."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Norm(nn.Module):
    """RMS norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., width] normed."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query causal attention over whole sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix x [rows, length, hidden]."""
        rows, length, _ = x.shape
        c = self.config
        q = self.q_proj(x).view(rows, length, c.heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, c.kv_heads, c.head_dim).transpose(1, 2)
        group = c.heads // c.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape as x [..., hidden]."""
        mixed: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.input_layernorm = Norm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the same shape as x [rows, length, hidden]."""
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        mixed: Tensor = x + self.drop(self.mlp(self.post_attention_layernorm(x)))
        return mixed


class Body(nn.Module):
    """Layers and final norm; names of parameters as in a Hugging Face Llama's `model.`."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        require_llama(config)
        self.config = config
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.layers))
        self.norm = Norm(config.hidden, config.norm_eps)

    def blocks(self) -> list[Layer]:
        """Return the layers."""
        return cast(list[Layer], list(self.layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return normed hidden states [rows, length, hidden] of inputs of the same shape."""
        cos, sin = rotary(self.config, x.shape[1], x.dtype)
        for layer in self.blocks():
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed


@dataclass
class Target:
    """The model to imitate: body, embedding and head [vocab, hidden] (the same where tied)."""

    body: Body
    embedding: Tensor
    head: Tensor


def body_of(config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Body:
    """Return a body with a checkpoint's weights, not to be trained."""
    with torch.device("meta"):
        body = Body(config)
    own = {name: weights[f"model.{name}"].to(dtype) for name in body.state_dict()}
    body.load_state_dict(own, assign=True)
    return body.requires_grad_(False)


def target_of(config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Target:
    """Return a checkpoint's model as a target."""
    embedding = weights["model.embed_tokens.weight"].to(dtype)
    head = embedding if config.tied else weights["lm_head.weight"].to(dtype)
    return Target(body_of(config, weights, dtype), embedding, head)
