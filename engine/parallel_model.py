"""A model that several ranks run, as rank 0 has it: a `Model` like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.engine.attention.paged import Attention
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.parallel import (
    HEAD,
    Shard,
    check_degree,
    make_shard,
    shard_config,
    shard_weights,
)
from parlay.engine.parallel_group import rank_device, send
from parlay.engine.parallel_orders import OPTIONS, Load, Logits, Move, NewCache, Run
from parlay.engine.parallel_team import START_S, Team
from parlay.engine.spans import Spans


@dataclass(slots=True, frozen=True)
class ParallelCache:
    """A cache of every rank's own heads; local: rank 0's."""

    team: Team
    role: int
    index: int
    local: Attention

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy keys and values between slots on every rank; see `PagedKV.move`."""
        slots = from_slots.cpu().numpy(), to_slots.cpu().numpy()
        with self.team.together(self.role, Move(self.role, self.index, *slots)):
            self.local.move(from_slots, to_slots)


class ParallelLlama:
    """A Llama on the first ranks of a team; see `parlay.engine.runner.Model` for its methods.

    local: rank 0's part; head_rows: of all parts. What goes in and what comes out is whole and on
    rank 0: drafts, heads, sampling and kept states need not know.
    """

    def __init__(
        self, team: Team, role: int, config: ModelConfig, local: Llama, head_rows: int
    ) -> None:
        self.team, self.role, self.config = team, role, config
        self.local, self.head_rows = local, head_rows
        self.dtype, self.device, self.embedding = local.dtype, local.device, local.embedding
        self._caches = 0

    def new_cache(self, blocks: int, block_tokens: int) -> ParallelCache:
        """Return an empty paged cache on every rank."""
        order = NewCache(self.role, blocks, block_tokens)
        with self.team.together(self.role, order, answer_s=self.team.deadline_s):
            local = self.local.new_cache(blocks, block_tokens)
        self._caches += 1
        return ParallelCache(self.team, self.role, self._caches - 1, local)

    def embed(self, ids: Tensor, states: Tensor | None = None) -> Tensor:
        """Return the input of tokens; see `Model.embed`."""
        return self.local.embed(ids, states)

    def run(
        self, x: Tensor, cache: ParallelCache, spans: Spans, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run every layer on every rank; see `Model.run`."""
        with self.team.together(self.role, Run(self.role, cache.index, spans)) as group:
            x = group.share(x.contiguous())
            return self.local.run(x, cache.local, spans, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, head rows] logits of normed states; each rank computes some columns."""
        with self.team.together(self.role, Logits(self.role, len(hidden))) as group:
            hidden = group.share(hidden.contiguous())
            whole = group.gather(self.local.logits(hidden), self.head_rows)
        assert whole is not None, "rank 0 gathers"
        return whole


def load_parallel(
    team: Team,
    role: int,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    embedding: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    invariant: bool = False,
) -> ParallelLlama:
    """Share a model's weights out among the ranks of a role; see `runner.load_model`.

    Raises ValueError for a degree that the model or the machine's GPUs do not allow.
    """
    degree = team.degrees[role]
    check_degree(OPTIONS[role], config, degree)
    device, last = rank_device(device, 0), rank_device(device, degree - 1)
    if last.type == "cuda" and last.index >= torch.cuda.device_count():
        raise ValueError(
            f"{OPTIONS[role]} {degree} from {device} on needs {last}, but torch sees"
            f" {torch.cuda.device_count()} GPUs"
        )
    shards = [Shard(rank, degree) for rank in range(degree)]
    sizes = [shard_config(config, shard) for shard in shards]
    own, *others = (list(shard_weights(config, weights, embedding, shard)) for shard in shards)
    rows, kind = len(weights.get(HEAD, embedding)), _name(dtype)
    orders = (
        Load(role, size, rows, kind, str(device), invariant, _specs(part))
        for size, part in zip(sizes[1:], others, strict=True)
    )
    assert role not in team.loaded, "a team has one model a role"
    team.loaded.add(role)
    team.join()
    with team.together(role, *orders, answer_s=START_S) as group:
        # In turn, so that nobody waits for long.
        for tensors in zip(*others, strict=True):
            for rank, (_, tensor) in enumerate(tensors, 1):
                send(tensor, rank)
        total = group.ordered_total if invariant else group.total
        local = make_shard(sizes[0], dict(own), embedding, dtype, device, total, invariant)
    return ParallelLlama(team, role, config, local, rows)


def _specs(part: Sequence[tuple[str, Tensor]]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(tensor.shape), _name(tensor.dtype)) for name, tensor in part]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
