"""What a model has beyond a plain Llama."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Local:
    """Layers that see only the last `window` tokens, a token's own included.

    layers: whether each layer is one of them. rope_theta: the base of their rotary angles.
    """

    layers: tuple[bool, ...]
    window: int
    rope_theta: float


@dataclass(slots=True, frozen=True)
class Traits:
    """What a model has beyond a plain Llama; the defaults are a Llama's.

    qkv_bias: queries, keys and values have biases. qk_norm: each head's query and key is RMS-normed
    before it is turned. query_scale: a factor of queries besides head_dim^-0.5, only with qk_norm.
    post_norms: what attention and feed-forward add is normed too. norm_plus_one: norms scale by
    1 + weight, in float32. gelu: the gate is GELU (its tanh form), not SiLU. scaled_embedding:
    inputs are multiplied by sqrt(hidden). local: layers with a window.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    query_scale: float = 1.0
    post_norms: bool = False
    norm_plus_one: bool = False
    gelu: bool = False
    scaled_embedding: bool = False
    local: Local | None = None


LLAMA = Traits()
