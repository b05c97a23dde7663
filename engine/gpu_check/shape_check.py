"""One shape measured: its passes, graphs, gaps, drafters and engine, each a section of its own."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parlay.engine.gpu_check import gaps, replay, sweep
from parlay.engine.gpu_check.budget import Budget
from parlay.engine.gpu_check.drafters import RandomHeads, RowsCost, ngram_ms, rows_cost
from parlay.engine.gpu_check.engine_run import (
    STATICS,
    Lane,
    blocks_for,
    run_batch,
    steady_config,
)
from parlay.engine.gpu_check.floor import Rates, floor_of
from parlay.engine.gpu_check.passes import BLOCK_TOKENS, Cell, Passes, capture_for, fill_cache
from parlay.engine.gpu_check.profile import profile_of
from parlay.engine.gpu_check.shapes import (
    Shape,
    free_bytes,
    kv_numbers,
    parameters,
    random_llama,
)
from parlay.engine.gpu_check.sweep import Grid
from parlay.engine.gpu_check.synthetic import MIX, SyntheticBackend
from parlay.engine.models import Llama
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.engine.virtual import Hazards

_SHARE = 0.7
"""Of the memory that is free: the caches may take so much, the rest is for passes."""
_CONTEXTS = (1024, 512, 256, 128, 64)
_GAP_STEPS = 40


@dataclass(slots=True, frozen=True)
class Plan:
    """How much of a shape to measure; batches: of the engine."""

    grids: Sequence[sweep.Axes]
    batches: tuple[int, ...]
    contexts: tuple[int, ...] = _CONTEXTS


FULL = Plan(sweep.GRIDS, (1, 8, 32, 128))
TINY = Plan(sweep.TINY_GRIDS, (1, 8), (64,))


class Room(ValueError):
    """What is asked for does not fit into a device's memory."""


@dataclass(slots=True)
class ShapeCheck:
    """A shape's models on a device, and what was found of them so far."""

    shape: Shape
    plan: Plan
    dtype: torch.dtype
    device: torch.device
    rates: Rates
    target: Llama = field(init=False)
    draft: Llama = field(init=False)
    grids: dict[str, Grid] = field(default_factory=dict)
    costs: dict[str, RowsCost] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    edges: tuple[int, ...] = ()

    def load(self) -> dict[str, Any]:
        """Make both models; raises Room where they do not fit beside a small cache."""
        self._release()
        size = self.dtype.itemsize
        need = size * sum(parameters(c) for c in (self.shape.target, self.shape.draft))
        free = free_bytes(self.device)
        if 1.2 * need > free:
            raise Room(
                f"{self.shape.name} needs {need / 1e9:.1f} GB of weights and a fifth of that "
                f"beside, {free / 1e9:.1f} GB are free"
            )
        self.target = random_llama(self.shape.target, self.dtype, self.device)
        self.draft = random_llama(self.shape.draft, self.dtype, self.device, 1)
        return {"weight_bytes": need, "free_bytes": free}

    def verify(self, budget: Budget) -> dict[str, Any]:
        """Measure the target's passes against their floors."""
        passes = self._passes(self.target)
        grid = sweep.sweep(self.plan.grids, passes.fits, passes.time_ms, budget)
        self.grids["target"] = grid
        rows = sweep.rows_of(grid, floor_of(self.shape.target, self.dtype, self.rates))
        attention = type(passes.runner.cache).__name__
        found = {"rows": rows, "left_out": grid.left_out, "attention": attention}
        if passes.graphs is not None:
            stats = passes.graphs.stats
            self.edges = passes.graphs.edges
            found["graphs"] = {"replayed": stats.replayed, "eager": dict(stats.eager)}
        return found | {"bar": sweep.bar_of(rows)}

    def drafting(self, budget: Budget) -> dict[str, Any]:
        """Measure the draft model's passes, Medusa heads and the n-gram."""
        passes = self._passes(self.draft)
        narrow = [
            sweep.Axes(g.batches, sweep.DRAFT_WIDTHS, g.contexts[:2]) for g in self.plan.grids
        ]
        grid = sweep.sweep(narrow, passes.fits, passes.time_ms, budget)
        self.grids["draft"] = grid
        del passes
        ends = (1, max(self.plan.batches))
        context = self.plan.contexts[0]
        self.costs["medusa"] = rows_cost(RandomHeads(self.target).time_ms, ends)
        self.costs["ngram"] = rows_cost(lambda batch: ngram_ms(batch, context), ends)
        rows = sweep.rows_of(grid, floor_of(self.shape.draft, self.dtype, self.rates))
        costs = {n: {"fixed_ms": c.fixed_ms, "row_ms": c.row_ms} for n, c in self.costs.items()}
        return {"rows": rows, "left_out": grid.left_out, **costs}

    def graphs(self, budget: Budget) -> dict[str, Any]:
        """Measure graphs against eager passes, and the gaps between the engine's steps."""
        found: dict[str, Any] = {"rows": [], "bar": None}
        passes = self._passes(self.target)
        if passes.graphs is not None:
            context = self.plan.contexts[0]
            found["rows"] = replay.compare(passes, context, 0.1 * budget.left_s)
            found["bar"] = replay.bar_of(found["rows"])
        else:
            found["skipped"] = "no CUDA, or an attention without graphs: every pass is eager"
        del passes
        context, backend = self._backend(1)
        synthetic = SyntheticBackend(backend, Hazards(MIX))
        lanes = [Lane(mode, synthetic, 1, context) for mode in gaps.MODES]
        waits = [gaps.measure_gaps(lane, _GAP_STEPS) for lane in lanes]
        return found | {"gaps": waits, "gap_bar": gaps.bar_of(waits)}

    def engine(self, budget: Budget) -> dict[str, Any]:
        """Decode with every mode at every batch that fits."""
        left_out = []
        for place, batch in enumerate(self.plan.batches):
            try:
                context, backend = self._backend(batch)
            except Room as error:
                left_out.append({"batch": batch, "why": str(error)})
                continue
            part = budget.share(1.0 / (len(self.plan.batches) - place))
            self.runs += run_batch(backend, batch, context, part)
            del backend
            self._release()
        return {"rows": self.runs, "left_out": left_out}

    def profile(self, source: str) -> dict[str, Any] | None:
        """Return what was found as a cost profile, None where a part that it needs is missing."""
        if not {"target", "draft"} <= self.grids.keys() or not self.costs:
            return None
        return profile_of(
            source, self.grids["target"], self.grids["draft"], self.costs["medusa"],
            self.costs["ngram"], self.runs, self.edges,
        )  # fmt: skip

    def _passes(self, model: Llama) -> Passes:
        """Return a model's passes over a cache for the largest cell, or what memory holds."""
        self._release()
        token = kv_numbers(model.config) * self.dtype.itemsize
        most = int(_SHARE * free_bytes(self.device) / token) // BLOCK_TOKENS
        largest = max(_kv_tokens(axes) for axes in self.plan.grids)
        blocks = min(-(-largest // BLOCK_TOKENS), most)
        return Passes(model, blocks, capture_for(self.device))

    def _backend(self, batch: int) -> tuple[int, TorchBackend]:
        """Return the longest prompt for which a batch fits, and a backend for it.

        Raises Room where none does.
        """
        self._release()
        numbers = kv_numbers(self.shape.target) + kv_numbers(self.shape.draft)
        block = BLOCK_TOKENS * numbers * self.dtype.itemsize
        room = int(_SHARE * free_bytes(self.device) / block)
        fitting = [c for c in self.plan.contexts if blocks_for(batch, c) <= room]
        if not fitting:
            raise Room(f"the caches of {batch} requests do not fit into {room} blocks")
        context = fitting[0]
        config = steady_config(batch, context, blocks_for(batch, context))
        ids = torch.arange(self.shape.draft.vocab, device=self.device)
        backend = TorchBackend(self.target, DraftModel(self.draft, ids), config)
        fill_cache(backend.runner)
        assert backend.draft is not None
        fill_cache(backend.draft.runner)
        return context, backend

    def _release(self) -> None:
        """Give memory that nothing uses back, so that what is free is known."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _kv_tokens(axes: sweep.Axes) -> int:
    """Return the KV tokens of the largest cell, many requests with long contexts apart."""
    cells: list[Cell] = axes.cells()
    return max(c.kv_tokens for c in cells if c.context <= 1024 or c.batch <= sweep.BAR_BATCH)


def speedups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each batch's best static, and adaptive modes' speed over it and over none."""
    found = []
    for batch in sorted({row["batch"] for row in rows}):
        speed = {r["mode"]: r["tokens_per_s"] for r in rows if r["batch"] == batch}
        fixed = {m: s for m, s in speed.items() if m in {"none", *(s.name for s in STATICS)}}
        best = max(fixed, key=lambda mode: fixed[mode])
        ours = {m: s / fixed[best] for m, s in speed.items() if m not in fixed}
        found.append(
            {"batch": batch, "best_static": best, "over_none": fixed[best] / speed["none"]}
            | {f"{mode}_over_best": ratio for mode, ratio in ours.items()}
        )
    return found
