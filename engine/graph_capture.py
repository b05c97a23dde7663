"""How a piece of work on static buffers is recorded and repeated: a CUDA graph, or called again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]
"""Reads and writes tensors that stay where they are; what it returns are its results."""

WARM_UPS = 2
"""Runs before a recording: kernels are compiled and chosen, workspaces taken, in the first."""


@dataclass(slots=True)
class Recording:
    """Work that can be repeated; results: where each `replay` leaves them, until the next one."""

    results: tuple[Tensor, ...]
    replay: Callable[[], None]


class Capture(Protocol):
    """Makes recordings."""

    def record(self, work: Work) -> Recording:
        """Run `work`, more than once; return what repeats it, on whatever its buffers hold then."""
        ...


class CudaCapture:
    """CUDA graphs of one device, in one pool of memory.

    Recordings share the pool: one's results hold until any of them is replayed, in stream order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def record(self, work: Work) -> Recording:
        """Capture `work` behind its warm-up, on a stream of its own."""
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    work()
            here.wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: theirs is not recorded.
            mode = "thread_local"
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode):
                results = work()
        return Recording(results, graph.replay)


class EagerCapture:
    """Calls the work again, and leaves its results where the first ones were: for tests."""

    def record(self, work: Work) -> Recording:
        """Run `work` as often as a capture does."""
        results = [work() for _ in range(WARM_UPS + 1)][-1]

        def replay() -> None:
            for kept, made in zip(results, work(), strict=True):
                kept.copy_(made)

        return Recording(results, replay)
