"""Whether outputs agree across modes, and whether what bf16 makes of them is only a near-tie.

Greedy bf16 is not bit-identical from one row count to another, speculation or not. A divergence
from the reference is sound where, recomputed in float32, neither token is further behind the best
one than the 99.9% logit noise of plain decoding (the two are then the best and the runner-up, but
for ties of three); and speculation must not diverge more often than plain decoding at other row
counts does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from parlay.engine.demo.stats import NONE
from parlay.policies.types import Array

if TYPE_CHECKING:
    from parlay.engine.demo.run import DemoRun

QUANTILE = 0.999


class Oracle(Protocol):
    """Recomputes logits apart from the run that is judged."""

    def behind(
        self, prompt: int, output: Sequence[int], tokens: Sequence[tuple[int, int]]
    ) -> Array:
        """Return how far tokens (place in the output, id) are behind the best, in logits."""
        ...

    def noise(self, outputs: Mapping[int, Sequence[int]], quantile: float) -> float:
        """Return that quantile of |bf16 gap - float32 gap|, plain decoding at other row counts."""
        ...


@dataclass(slots=True, frozen=True)
class Divergence:
    """Where an output first leaves the reference: what was expected there and what came."""

    mode: str
    cell: str
    prompt: int
    position: int
    expected: int
    emitted: int


@dataclass(slots=True)
class Agreement:
    """Outputs compared, by prompt, and divergences: speculating, and plain at other row counts."""

    reference: dict[int, list[int]]
    compared: dict[int, int] = field(default_factory=dict)
    compared_plain: dict[int, int] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    plain: list[Divergence] = field(default_factory=list)


def compare(run: DemoRun) -> Agreement:
    """Compare every output with no speculation's first one at the lowest concurrency it ran at."""
    home: dict[int, int] = {}
    found = Agreement({})
    for cell, plain in zip(run.cells, run.rounds[0][NONE], strict=True):
        for prompt, output in plain.outputs:
            if prompt not in found.reference:
                found.reference[prompt], home[prompt] = output, cell.concurrency
    for by_mode in run.rounds:
        for mode, runs in by_mode.items():
            for cell, done in zip(run.cells, runs, strict=True):
                for prompt, output in done.outputs:
                    if mode != NONE:
                        compared, divergences = found.compared, found.divergences
                    elif cell.concurrency != home[prompt]:
                        compared, divergences = found.compared_plain, found.plain
                    else:
                        continue
                    compared[prompt] = compared.get(prompt, 0) + 1
                    place = first_difference(found.reference[prompt], output)
                    if place is not None:
                        expected = found.reference[prompt][place]
                        divergences.append(
                            Divergence(mode, cell.label, prompt, place, expected, output[place])
                        )
    return found


def first_difference(reference: Sequence[int], output: Sequence[int]) -> int | None:
    """Return the first place where two outputs differ; equal ones end at the same place."""
    for place, (a, b) in enumerate(zip(reference, output, strict=False)):
        if a != b:
            return place
    assert len(reference) == len(output), "one output went on where an equal one ended"
    return None


def judge(found: Agreement, oracle: Oracle) -> dict[str, Any]:
    """Return the verdict for the report; the oracle is asked only where something diverged."""
    verdict: dict[str, Any] = {
        "outputs_compared": sum(found.compared.values()),
        "divergent_outputs": len(found.divergences),
        "sound_divergences": 0,
        "unsound": [],
        "logit_noise": None,
        "largest_gap": None,
    }
    if found.divergences:
        noise = oracle.noise(found.reference, QUANTILE)
        gaps, unsound = _gaps(found, oracle), []
        for d in found.divergences:
            gap = gaps[d.prompt, d.position, d.expected, d.emitted]
            if not gap <= noise:
                unsound.append(_describe(d, gap))
        verdict["sound_divergences"] = len(found.divergences) - len(unsound)
        verdict["unsound"], verdict["logit_noise"] = unsound, noise
        verdict["largest_gap"] = max(gaps.values())
    verdict["rate"] = rates(found)
    verdict["identical"] = not verdict["unsound"] and not verdict["rate"]["higher"]
    return verdict


def _describe(d: Divergence, gap: float) -> dict[str, Any]:
    return {
        "mode": d.mode, "cell": d.cell, "prompt": d.prompt, "position": d.position,
        "expected": d.expected, "emitted": d.emitted, "why": f"{gap:.4f} behind the best",
    }  # fmt: skip


def _gaps(found: Agreement, oracle: Oracle) -> dict[tuple[int, int, int, int], float]:
    """Return how far the worse of each divergence's two tokens is behind the best in float32."""
    gaps: dict[tuple[int, int, int, int], float] = {}
    for prompt in sorted({d.prompt for d in found.divergences}):
        here = [d for d in found.divergences if d.prompt == prompt]
        upto = max(d.position for d in here) + 1
        tokens = [(d.position, token) for d in here for token in (d.expected, d.emitted)]
        behind = oracle.behind(prompt, found.reference[prompt][:upto], tokens).reshape(-1, 2)
        for d, gap in zip(here, behind.max(axis=1), strict=True):
            gaps[prompt, d.position, d.expected, d.emitted] = float(gap)
    return gaps


def rates(found: Agreement) -> dict[str, Any]:
    """Return shares of outputs that diverge, and whether speculation's is higher beyond chance.

    Outputs of one prompt are not independent, so the difference is taken by prompt; it is higher
    where its mean over prompts is above two standard errors.
    """
    prompts = [p for p in found.compared if found.compared_plain.get(p)]
    counts = {p: _share(found, p) for p in prompts}
    spec = np.asarray([counts[p][0] for p in prompts])
    plain = np.asarray([counts[p][1] for p in prompts])
    difference = spec - plain
    error = float(difference.std(ddof=1) / math.sqrt(len(prompts))) if len(prompts) > 1 else 0.0
    mean = float(difference.mean()) if prompts else 0.0
    return {
        "speculating": float(spec.mean()) if prompts else 0.0,
        "plain_at_other_row_counts": float(plain.mean()) if prompts else 0.0,
        "standard_error": error,
        "higher": mean > 2 * error,
    }


def _share(found: Agreement, prompt: int) -> tuple[float, float]:
    spec = sum(d.prompt == prompt for d in found.divergences) / found.compared[prompt]
    plain = sum(d.prompt == prompt for d in found.plain) / found.compared_plain[prompt]
    return spec, plain
