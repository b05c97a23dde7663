"""A rank other than 0: a process that does what it is told until rank 0 is gone.

`python -m parlay.engine.parallel_rank FD RANK`, started by `parallel_team.py`; FD is the pipe.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from multiprocessing.connection import Connection

import torch

from parlay.engine.attention.paged import Attention
from parlay.engine.models import Llama
from parlay.engine.parallel import make_shard
from parlay.engine.parallel_group import Group, join, leave, rank_device, receive
from parlay.engine.parallel_orders import READY, Join, Load, Logits, Move, NewCache, Order, Run


class Follower:
    """The parts of models that a rank has; groups: of each role."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.models: dict[int, Llama] = {}
        self.caches: dict[int, list[Attention]] = {}
        self.head_rows: dict[int, int] = {}

    def obey(self, order: Order) -> None:
        """Do one thing together with rank 0."""
        match order:
            case Run():
                cache = self.caches[order.role][order.cache]
                x = self._shared(order.role, sum(order.spans.lengths))
                self.models[order.role].run(x, cache, order.spans)
            case Logits():
                model, group = self.models[order.role], self.groups[order.role]
                hidden = self._shared(order.role, order.rows)
                group.gather(model.logits(hidden), self.head_rows[order.role])
            case Move():
                device = self.models[order.role].device
                slots = (order.from_slots, order.to_slots)
                moved = (torch.from_numpy(s).to(device) for s in slots)
                self.caches[order.role][order.cache].move(*moved)
            case NewCache():
                made = self.models[order.role].new_cache(order.blocks, order.block_tokens)
                self.caches[order.role].append(made)
            case Load():
                self._load(order)
            case Join():
                raise AssertionError("a rank joins once")

    def _shared(self, role: int, rows: int) -> torch.Tensor:
        """Return what rank 0 has of [rows, hidden]."""
        model = self.models[role]
        x = torch.empty(rows, model.config.hidden, dtype=model.dtype, device=model.device)
        return self.groups[role].share(x)

    def _load(self, order: Load) -> None:
        group = self.groups[order.role]
        weights = {n: receive(shape, getattr(torch, kind)) for n, shape, kind in order.tensors}
        device = rank_device(torch.device(order.device), group.shard.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        total = group.ordered_total if order.invariant else group.total
        dtype = getattr(torch, order.dtype)
        self.models[order.role] = make_shard(
            order.config, weights, None, dtype, device, total, order.invariant
        )
        self.caches[order.role], self.head_rows[order.role] = [], order.head_rows


def follow(orders: Connection, rank: int) -> None:
    """Obey until rank 0 says no more (None); raises EOFError where it is gone."""
    orders.send(READY)
    first: Join = orders.recv()
    torch.set_num_threads(first.threads)
    follower = Follower(join(first, rank))
    orders.send(READY)
    with torch.inference_mode():
        while (order := orders.recv()) is not None:
            follower.obey(order)
            if isinstance(order, Load | NewCache):
                orders.send(READY)


def main() -> None:
    """Follow; what fails is said to rank 0, which tells the user."""
    # Rank 0 may want to finish what runs: it decides when the engine ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orders = Connection(int(sys.argv[1]))
    try:
        follow(orders, int(sys.argv[2]))
    except EOFError:
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            orders.send(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    leave()


if __name__ == "__main__":
    main()
