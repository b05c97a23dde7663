"""A model's passes at chosen sizes: as many requests, tokens each and context as asked for.

By graphs where the attention can run by them, as in the engine, and one by one where asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from parlay.engine.gpu_check.floor import sync, timed_ms
from parlay.engine.graph_capture import Capture, CudaCapture
from parlay.engine.graphs import EDGES, Graphs
from parlay.engine.landed import Landed
from parlay.engine.models import Llama
from parlay.engine.runner import Runner
from parlay.engine.sampling import first_choices
from parlay.engine.spans import Spans

BLOCK_TOKENS = 16
_MOST_TOKENS = EDGES[-1]
_LEAST_REPEATS, _MOST_REPEATS = 3, 20


@dataclass(slots=True, frozen=True, order=True)
class Cell:
    """A pass: `batch` requests feed `width` tokens each behind `context` tokens."""

    batch: int
    width: int
    context: int

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens' keys and values the cache must hold, blocks filled up."""
        return self.batch * -(-(self.context + self.width) // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(slots=True)
class Passes:
    """A model with a cache of `blocks`, every request's blocks its own, filled with noise.

    capture: makes graphs, None: every pass is launched kernel by kernel.
    """

    model: Llama
    blocks: int
    capture: Capture | None = None
    runner: Runner = field(init=False)
    graphs: Graphs | None = field(init=False)

    def __post_init__(self) -> None:
        self.runner = Runner(self.model, self.blocks, BLOCK_TOKENS)
        fill_cache(self.runner)
        if self.capture is not None:
            longest = min(self.model.config.context, self.blocks * BLOCK_TOKENS)
            self.runner.use_graphs(_MOST_TOKENS, longest, self.capture)
        self.graphs = self.runner.graphs

    def fits(self, cell: Cell) -> bool:
        """Say whether the cache and the model's context hold a cell."""
        longest = cell.context + cell.width
        return cell.kv_tokens <= self.blocks * BLOCK_TOKENS and longest <= self.model.config.context

    @torch.inference_mode()
    def run(self, cell: Cell, eager: bool = False) -> Landed:
        """Run a pass to the logits of every token; they hold until the next pass.

        eager: kernel by kernel, though there are graphs.
        """
        each = -(-(cell.context + cell.width) // BLOCK_TOKENS)
        tables = [list(range(r * each, (r + 1) * each)) for r in range(cell.batch)]
        spans = Spans(tables, [cell.context] * cell.batch, [cell.width] * cell.batch)
        vocab, tokens = self.model.config.vocab, cell.batch * cell.width
        ids = (7 * np.arange(tokens, dtype=np.int64)) % vocab
        self.runner.graphs = None if eager else self.graphs
        return self.runner.forward(ids, spans)

    @torch.inference_mode()
    def choose(self, cell: Cell, eager: bool = False) -> Tensor:
        """Run a pass and choose greedily at every place, as verification does; i64, on the host."""
        landed = self.run(cell, eager)
        choice = landed.after[0] if landed.after else first_choices(landed.logits)
        return choice.cpu()

    def time_ms(self, cell: Cell, most_s: float, eager: bool = False) -> float:
        """Return the median time of a pass, nan where memory is short.

        Repeats take about `most_s`, the first one apart.
        """
        device = self.model.device
        try:
            self.choose(cell, eager)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return float("nan")
        once_ms = timed_ms(device, lambda: self.choose(cell, eager), 1)
        repeats = int(1e3 * most_s / max(once_ms, 1e-3))
        repeats = min(max(repeats, _LEAST_REPEATS), _MOST_REPEATS)
        return timed_ms(device, lambda: self.choose(cell, eager), repeats)


def capture_for(device: torch.device) -> Capture | None:
    """Return what makes graphs on a device, None where there are none."""
    return CudaCapture(device) if device.type == "cuda" else None


def fill_cache(runner: Runner) -> None:
    """Fill a runner's cache with noise: memory that was never written costs less to read."""
    for pool in runner.cache.cache.layers:
        pool.normal_()
    sync(runner.model.device)
