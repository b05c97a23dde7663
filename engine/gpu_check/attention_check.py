"""Attention backends against the dense reference, over random shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parlay.engine.attention.alone import AloneAttention
from parlay.engine.attention.choice import choose_attention
from parlay.engine.attention.paged import Attention, PagedKV
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.gpu_check.attention_case import (
    Case,
    appended,
    attended,
    filled_cache,
    random_case,
)
from parlay.engine.gpu_check.budget import Budget

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}
"""Most |error| over the largest |value|. An output is a mean of values: two roundings to the dtype,
of its weights and of itself, each half a unit in the last place, with twice that to spare in
bfloat16; float32's sums of up to 800 terms err more than its last place."""
LEAST_CASES = 4

Make = Callable[[PagedKV, int], Attention]


def backends(device: torch.device) -> dict[str, Make]:
    """Return the attentions that run on a device: the one that models get, and those of torch."""
    chosen: Make = choose_attention(device)
    return {made.__name__: made for made in (chosen, SdpaAttention, AloneAttention)}


def check_attention(
    device: torch.device, budget: Budget, cases: int, seed: int = 0
) -> dict[str, Any]:
    """Compare every backend in float32 and bfloat16 over random cases; return errors and a verdict.

    At least LEAST_CASES are run of each, then as many as the budget lets.
    """
    rows = []
    kinds = [(name, make, dtype) for name, make in backends(device).items() for dtype in BOUNDS]
    worst = {(name, dtype): 0.0 for name, _, dtype in kinds}
    moved_right = dict.fromkeys(worst, True)
    done = 0
    while done < cases and (done < LEAST_CASES or not budget.over):
        for dtype in BOUNDS:
            case = random_case(np.random.default_rng([seed, done]), dtype)
            right, pool = attended(case), appended(case)
            for name, make, kind in kinds:
                if kind is dtype:
                    error, moves = _run(case, right, pool, make, device)
                    # nan must not pass for small.
                    worst[name, dtype] = max(worst[name, dtype], error if error == error else 9e9)
                    moved_right[name, dtype] &= moves
        done += 1
    for name, _, dtype in kinds:
        rows.append(
            {
                "backend": name,
                "dtype": str(dtype).removeprefix("torch."),
                "cases": done,
                "worst_error": worst[name, dtype],
                "bound": BOUNDS[dtype],
                "moves_right": moved_right[name, dtype],
                "passed": worst[name, dtype] <= BOUNDS[dtype] and moved_right[name, dtype],
            }
        )
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


@torch.inference_mode()
def _run(
    case: Case, right: Tensor, pool: Tensor, make: Make, device: torch.device
) -> tuple[float, bool]:
    """Return the largest error over the largest value, and whether appending and moving are exact.

    right and pool: the reference's output, and its pool after the append.
    """
    cache = filled_cache(case, device)
    attention = make(cache, case.heads)
    plan = attention.plan(case.spans, case.window)
    out = attention(0, case.q.to(device), case.kv.to(device), plan)
    error = float((out.float().cpu() - right).abs().max()) / float(pool.float().abs().max())
    slots = np.random.default_rng(case.blocks).permutation(pool.shape[1])
    source, target = (torch.from_numpy(s) for s in np.array_split(slots[: len(slots) // 2 * 2], 2))
    attention.move(source.to(device), target.to(device))
    expected = pool.clone()
    expected[:, target] = pool[:, source]
    return error, torch.equal(cache.layers[0].cpu().view_as(expected), expected)
