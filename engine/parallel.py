"""How a model's weights are shared out among the ranks that run it together.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): a rank has some of the attention heads and
some of the feed-forward's width, computes its part of what each adds, and the parts are summed.
Everything here is pure; `parallel_team.py` says who runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.engine.linear import Linear
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama

Sum = Callable[[Tensor], Tensor]
"""Adds up what every rank has, [rows, hidden]; may write to its argument."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INPUT = (EMBEDDING, "in_proj.weight", "state_proj.weight")
"""What only rank 0 needs: it makes the input of every pass."""


@dataclass(slots=True, frozen=True)
class Shard:
    """One of `size` ranks that run a model; rank 0 leads."""

    rank: int
    size: int

    def part(self, total: int) -> slice:
        """Return this rank's part of `total` things; parts differ by one at most, the first last.

        Rank 0 has more to do besides, so what does not divide goes to others.
        """
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)


def check_degree(option: str, config: ModelConfig, size: int) -> None:
    """Raise ValueError where a model cannot be shared out among so many ranks."""
    if not 1 <= size <= config.kv_heads:
        raise ValueError(
            f"{option} {size}: each rank needs a KV head of its own, and the model has"
            f" {config.kv_heads}; take 1 to {config.kv_heads}"
        )


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the sizes of a rank's part."""
    kv = shard.part(config.kv_heads)
    ffn = shard.part(config.ffn)
    kv_heads = kv.stop - kv.start
    share = config.heads // config.kv_heads
    return replace(config, heads=share * kv_heads, kv_heads=kv_heads, ffn=ffn.stop - ffn.start)


def shard_weights(
    config: ModelConfig, weights: Mapping[str, Tensor], embedding: Tensor, shard: Shard
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and views of a rank's part of weights that have Hugging Face's names.

    Query heads go with their KV head. The output layer's rows are shared out too, those of an
    embedding that serves as one included.
    """
    kv, share = shard.part(config.kv_heads), config.heads // config.kv_heads

    def heads(each: int) -> slice:
        each *= config.head_dim
        return slice(kv.start * each, kv.stop * each)

    ffn = shard.part(config.ffn)
    rows = {"self_attn.q_proj": heads(share), "mlp.gate_proj": ffn, "mlp.up_proj": ffn}
    rows |= {f"self_attn.{n}_proj": heads(1) for n in "kv"}
    columns = {"self_attn.o_proj": heads(share), "mlp.down_proj": ffn}
    for name, weight in weights.items():
        part = name.split(".", 3)[-1].rpartition(".")[0]
        if part in rows:
            yield name, weight[rows[part]]
        elif part in columns:
            assert not name.endswith("bias"), "every rank would add it"
            yield name, weight[:, columns[part]]
        elif name != HEAD and (shard.rank == 0 or name not in INPUT):
            yield name, weight
    head = weights.get(HEAD, embedding)
    yield HEAD, head[shard.part(len(head))]


def make_shard(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    embedding: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    total: Sum,
    invariant: bool = False,
) -> Llama:
    """Lay out a rank's part, of which config and weights are; total sums over the ranks.

    embedding: what rank 0 reads; None: nothing. Its keys and values are those of its own heads, the
    states between layers are whole on every rank, and `logits` returns its own rows of the head.
    """
    read = torch.empty(0, config.hidden) if embedding is None else embedding
    llama = Llama(config, weights, read, dtype, device, invariant)
    for layer in llama.layers:
        layer.out, layer.down = _summed(layer.out, total), _summed(layer.down, total)
    return llama


def _summed(linear: Linear, total: Sum) -> Linear:
    return lambda x: total(linear(x))
