"""What ranks do together, by torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parlay.engine.parallel import Shard
from parlay.engine.parallel_orders import Join


class Group:
    """The ranks that run one model, as one of them sees it; rank 0 leads."""

    def __init__(self, handle: Any, shard: Shard) -> None:
        self._handle, self.shard = handle, shard

    def total(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place."""
        dist.all_reduce(x, group=self._handle)
        return x

    def ordered_total(self, x: Tensor) -> Tensor:
        """Sum x over the ranks in their order, whatever its shape: a row's bits are its own."""
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        dist.all_gather(parts, x, group=self._handle)
        first, *others = parts
        for part in others:
            first += part
        return first

    def share(self, x: Tensor) -> Tensor:
        """Write rank 0's x to every rank's; returns it."""
        dist.broadcast(x, 0, group=self._handle)
        return x

    def gather(self, x: Tensor, columns: int) -> Tensor | None:
        """Return every rank's columns of [rows, columns] side by side on rank 0, None elsewhere.

        x [rows, this rank's `Shard.part` of them].
        """
        shard, widest = self.shard, -(-columns // self.shard.size)
        own = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        if shard.rank:
            dist.gather(own, dst=0, group=self._handle)
            return None
        parts = [torch.empty_like(own) for _ in range(shard.size)]
        dist.gather(own, parts, dst=0, group=self._handle)
        widths = (Shard(rank, shard.size).part(columns) for rank in range(shard.size))
        cut = [p[:, : w.stop - w.start] for p, w in zip(parts, widths, strict=True)]
        return torch.cat(cut, 1)


def join(order: Join, rank: int) -> list[Group]:
    """Meet the others; return the group of each role. Rank 0 and the others call it alike."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        # One machine: nobody else may connect, and its host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    deadline = timedelta(seconds=order.deadline_s)
    dist.init_process_group(
        order.backend,
        init_method=Path(order.store).as_uri(),
        rank=rank,
        world_size=order.world,
        timeout=deadline,
    )
    return [
        Group(dist.new_group(list(range(degree)), timeout=deadline), Shard(rank, degree))
        for degree in order.degrees
    ]


def leave() -> None:
    """Part from the others, who may be gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_joined() -> bool:
    """Say whether this process is in a process group, ours or another's."""
    return bool(dist.is_initialized())


def backend() -> str:
    """Return what this machine's ranks talk by, as torch.distributed names it."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def send(tensor: Tensor, rank: int) -> None:
    """Send a tensor to a rank, as bytes through host memory: any dtype goes."""
    dist.send(tensor.cpu().contiguous().view(-1).view(torch.uint8), rank)


def receive(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the next tensor that rank 0 sends to this one, on the CPU."""
    tensor = torch.empty(shape, dtype=dtype)
    dist.recv(tensor.view(-1).view(torch.uint8), 0)
    return tensor


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank: a GPU each, from rank 0's on."""
    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)
