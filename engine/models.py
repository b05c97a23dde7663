"""A lean decoder over flat ragged batches: fused QKV and gate-up, prepacked weights, no modules.

Llama and what is near it: `traits.py` says what other families add, each of it None or absent where
a model has it not. Target and draft run the same code; a draft may read embeddings of another width
through `in_proj`, and the target's states through `state_proj`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.attention.alone import AloneAttention
from parlay.engine.attention.choice import choose_attention
from parlay.engine.attention.paged import Attention, PagedKV
from parlay.engine.layers import Loader
from parlay.engine.model_config import ModelConfig
from parlay.engine.rotary import rotary_angles
from parlay.engine.spans import Spans

STATE_EPS = 1e-6
"""Added to the mean square of a tapped state where it is normed."""


@dataclass(slots=True)
class Reach:
    """How some layers see positions: rotary tables [context, 1, head_dim], and how many tokens back
    (None: all of them).
    """  # noqa: D205

    cos: Tensor
    sin: Tensor
    window: int | None


class Llama:
    """Weights laid out for decoding, on one device in one dtype.

    weights: Hugging Face names; embedding [vocab, width] of what is read (the target's own for a
    draft). invariant: a token has the same bits in every batch, among drafts and alone, at a price;
    raises ValueError where the machine cannot.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool = False,
    ) -> None:
        self.config, self.dtype, self.device, self.invariant = config, dtype, device, invariant
        self.embedding = embedding.to(device=device, dtype=dtype)
        load = Loader(config, weights, dtype, device, invariant)
        self.in_proj = load.linear("in_proj") if "in_proj.weight" in weights else None
        self.state_proj = load.linear("state_proj") if "state_proj.weight" in weights else None
        self.layers = [load.layer(index) for index in range(config.layers)]
        self.norm = load.norm("model.norm")
        tied = "lm_head.weight" not in weights
        self.head = load.made(self.embedding) if tied else load.linear("lm_head")
        traits = config.traits
        self.gate: Callable[[Tensor], Tensor] = (
            functools.partial(F.gelu, approximate="tanh") if traits.gelu else F.silu
        )
        # Rounded to the dtype, as it was in training.
        scale = torch.tensor(config.hidden**0.5).to(device, dtype)
        self.embedding_scale = scale if traits.scaled_embedding else None
        self.reaches = [self._reach(config.rope_theta, None)]
        if traits.local is not None:
            self.reaches.append(self._reach(traits.local.rope_theta, traits.local.window))

    def new_cache(self, blocks: int, block_tokens: int) -> Attention:
        """Return an empty paged cache with the attention over it."""
        c = self.config
        cache = PagedKV(c, blocks, block_tokens, self.dtype, self.device)
        made = AloneAttention if self.invariant else choose_attention(self.device)
        return made(cache, c.heads)

    def embed(self, ids: Tensor, states: Tensor | None = None) -> Tensor:
        """Return the input of tokens; see `Model.embed`."""
        x = self.embedding[ids]
        if self.in_proj is not None:
            x = self.in_proj(x)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if states is not None:
            assert self.state_proj is not None, "this model reads no states"
            x = x + self.state_proj(states)
        return x

    def run(
        self, x: Tensor, cache: Attention, spans: Spans, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run every layer; see `Model.run`."""
        return self.run_over(x, cache, self.plans(cache, spans), taps)

    def plans(self, cache: Attention, spans: Spans) -> list[Any]:
        """Return a pass over `spans` for each of the reaches."""
        return [cache.plan(spans, reach.window) for reach in self.reaches]

    def run_over(
        self, x: Tensor, cache: Attention, plans: Sequence[Any], taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Do as `run` over passes that are laid out: one for each of the reaches."""
        c, half = self.config, self.config.head_dim // 2
        tapped: list[Tensor] = []
        seen = [_seen(*both) for both in zip(self.reaches, plans, strict=True)]
        for index, layer in enumerate(self.layers):
            plan, cos, sin = seen[layer.reach]
            y = layer.qkv(self._normed(x, layer.input_norm))
            y = y.view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            turned = y[:, : c.heads + c.kv_heads]
            if layer.qk_norm is not None:
                turned = self._heads_normed(turned, layer.qk_norm)
            # Half-split rotary: (a, b) -> (a cos - b sin, b cos + a sin); sin holds (-sin, sin).
            turned = turned * cos + torch.cat((turned[..., half:], turned[..., :half]), -1) * sin
            kv = torch.cat((turned[:, c.heads :], y[:, c.heads + c.kv_heads :]), 1)
            mixed = cache(index, turned[:, : c.heads], kv, plan)
            added = layer.out(mixed.reshape(-1, c.heads * c.head_dim))
            x = x + (added if layer.out_norm is None else self._normed(added, layer.out_norm))
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, -1)
            added = layer.down(self.gate(gate) * up)
            x = x + (added if layer.down_norm is None else self._normed(added, layer.down_norm))
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
        """Norm in the weight's dtype, which is float32 where only the product is to be rounded."""
        if weight.dtype is x.dtype:
            return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.config.norm_eps).to(x.dtype)

    def _heads_normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm every head of x [tokens, heads, head_dim] by its own row of weight."""
        normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), eps=self.config.norm_eps)
        return (normed * weight).to(x.dtype)

    def _reach(self, theta: float, window: int | None) -> Reach:
        angles = rotary_angles(self.config, self.config.context, theta)
        cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
        sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
        return Reach(cos.to(self.device, self.dtype), sin.to(self.device, self.dtype), window)


def _seen(reach: Reach, plan: Any) -> tuple[Any, Tensor, Tensor]:
    """Return a pass of one reach with its tokens' cos and sin [tokens, 1, head_dim]."""
    return plan, reach.cos[plan.positions], reach.sin[plan.positions]
