"""Our cost models against published end-to-end figures.

Each source's acceptance is one number, the chance that a drafted token holds, fitted on the points
marked `fitted`; everything else is held out. Emitted tokens a step are (1 - a^(k+1)) / (1 - a)
(Leviathan et al., 2211.17192). Where a source leaves its model or GPU open, `SOURCES` says what we
took it to be.

Why ours differ by more than a tenth. Found by trial: small batches (vLLM 32374, 2601.11580's EAGLE)
are slow for the 1.2 ms of host time and the .3 ms a draft pass that every model here adds; with 0
and .1 they are within 7%. The regression of 2601.11580 is one line through tokens, so it cannot
show that they are nearly free until arithmetic outgrows the weights, as the measured GEMMs do.
Held-out speed-ups hang on the context, which no source gives: GH200 at 256 requests is +16 and
+26% at 1,024 tokens, -5 and +9% at 512. One acceptance for all places cannot meet both k at batch 1
(k = 3 asks for .60, k = 7 for .69). Not found: what takes 4-19 ms more at batch 256 in vLLM 32374;
prompts that join a served batch and sampling over the vocabulary are in no table here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.sim.costs import CostModel, StepTime, Work, load_costs


@dataclass(slots=True, frozen=True)
class Row:
    """One published figure and ours; error is ours / published - 1."""

    source: str
    setting: str
    published: float
    ours: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """Return the relative error."""
        return self.ours / self.published - 1.0


@dataclass(slots=True, frozen=True)
class Source:
    """Speed by (batch, k); `fitted` are the points that its acceptance is fitted on.

    unit: "x" against k = 0 at the same batch, or "tokens/s".
    """

    name: str
    costs: str
    context_tokens: int
    unit: str
    figures: dict[tuple[int, int], float]
    fitted: tuple[tuple[int, int], ...]


_SGLANG = {
    1: (162, 289, 528, 823, 1268, 2143, 3353),
    3: (195, 332, 572, 896, 1531, 2352, 3555),
    5: (199, 331, 569, 905, 1464, 2316, 3222),
}
SOURCES = (
    # Taken to be Llama-3.1-8B with an EAGLE-3 head.
    Source(
        "vLLM on GH200",
        "roofline:gh200/llama-3.1-8b+eagle3-llama-3.1-8b",
        1024,
        "x",
        {(1, 7): 1.87, (256, 7): 0.74, (1, 3): 1.70, (256, 3): 0.97},
        ((1, 7), (1, 3)),
    ),
    # Nightjar, 2512.22420; its draft taken to be the 0.5B of the same family.
    Source(
        "Nightjar on A100",
        "roofline:a100/qwen2.5-7b+qwen2.5-0.5b",
        512,
        "x",
        {(1, 3): 1.50, (128, 3): 0.65},
        ((1, 3),),
    ),
    # SGLang's static steps. Of 20 guesses of model and GPUs this one fits best, held-out points
    # included, and no dense model grows so early with the batch: a likeness, not a check.
    Source(
        "SGLang",
        "roofline:h20/qwen3-235b-a22b+eagle3-qwen3-235b-a22b:tp=8",
        512,
        "tokens/s",
        {
            (batch, k): float(value)
            for k, line in _SGLANG.items()
            for batch, value in zip((1, 2, 4, 8, 16, 32, 64), line, strict=True)
        },
        ((1, 1), (1, 3), (1, 5)),
    ),
)


def emitted(accept: float, k: int) -> float:
    """Return the expected tokens of a step that drafts k, each holding with chance `accept`."""
    return float(sum(accept**j for j in range(k + 1)))


def uniform_step(costs: CostModel, batch: int, k: int, context_tokens: int) -> StepTime:
    """Return the step in which `batch` requests of one context each draft and verify k tokens."""
    kv = batch * context_tokens
    return costs.time(
        Work(batch * (k + 1), batch, kv, draft_rows=(batch,) * k, draft_kv_tokens=kv if k else 0)
    )


def compare() -> list[Row]:
    """Return every published figure beside ours."""
    rows = [row for source in SOURCES for row in speeds(source)]
    return rows + fitted_step_times() + step_times()


def speeds(source: Source) -> list[Row]:
    """Return a source's speeds, with the acceptance that fits its fitted points best."""
    costs = load_costs(source.costs)
    accept = fit_acceptance(source, costs)
    return [
        Row(
            source.name,
            f"batch {batch} k={k}, {source.unit}",
            published,
            emitted(accept, k) * _per_token(source, costs, batch, k),
            (batch, k) in source.fitted,
        )
        for (batch, k), published in source.figures.items()
    ]


def fit_acceptance(source: Source, costs: CostModel) -> float:
    """Return the acceptance of least squared log error on the fitted points, to .0025."""
    published = np.log([source.figures[at] for at in source.fitted])
    per_token = np.log([_per_token(source, costs, *at) for at in source.fitted])
    grid = np.arange(0.0, 1.0, 0.0025)
    tokens = np.log([[emitted(float(a), k) for _, k in source.fitted] for a in grid])
    return float(grid[int(((tokens + per_token - published) ** 2).sum(1).argmin())])


def _per_token(source: Source, costs: CostModel, batch: int, k: int) -> float:
    """Return a step's speed, in the source's unit, for each token it emits a request."""
    step_ms = uniform_step(costs, batch, k, source.context_tokens).step_ms
    if source.unit == "tokens/s":
        return 1e3 * batch / step_ms
    return uniform_step(costs, batch, 0, source.context_tokens).step_ms / step_ms


def fitted_step_times() -> list[Row]:
    """Return the verify and draft times of 2601.11580's regression (Llama-3.1-8B, H100)."""
    costs = load_costs("roofline:h100/llama-3.1-8b+eagle-llama-3.1-8b")
    rows = []
    for batch, k, context in _GRID:
        kv, tokens = batch * context, batch * (k + 1)
        published = 1e3 * (3.926e-8 * kv + 2.101e-5 * tokens + 5.886e-3)
        ours = costs.time(Work(tokens, batch, kv)).verify_ms
        setting = f"batch {batch} k={k} context {context}, verify ms"
        rows.append(Row("2601.11580", setting, published, ours))
    for batch in (1, 16, 64):
        kv = batch * 1024
        published = 1e3 * (2.378e-9 * kv + 2.135e-3)
        ours = float(uniform_step(costs, batch, 3, 1024).draft_ms.sum())
        rows.append(Row("2601.11580", f"batch {batch} 3 passes of EAGLE, ms", published, ours))
    return rows


_GRID = tuple((batch, k, 1024) for batch in (1, 16, 64, 128) for k in (0, 3))
_GRID += ((64, 0, 4096), (64, 3, 4096))


def step_times() -> list[Row]:
    """Return vLLM's start-up profile in its pull request 32374 (Llama-3.1-8B with EAGLE).

    Its GPU is not named beside it; taken to be an H100, as in its author's other measurements.
    """
    costs = load_costs("roofline:h100/llama-3.1-8b+eagle-llama-3.1-8b")
    return [
        Row(
            "vLLM 32374",
            f"batch {batch} k={k}, step ms",
            published,
            uniform_step(costs, batch, k, 256).step_ms,
        )
        for batch, line in _VLLM_STEP_MS.items()
        for k, published in zip((0, 1, 3, 5), line, strict=True)
    ]


_VLLM_STEP_MS = {
    1: (6.521, 7.368, 8.841, 10.326),
    4: (6.602, 7.473, 8.981, 10.400),
    16: (6.899, 7.852, 9.518, 11.196),
    64: (7.774, 9.656, 13.498, 16.831),
    256: (14.491, 27.138, 41.848, 57.404),
}


def main() -> None:
    """Print every figure beside ours."""
    for row in compare():
        mark = "fitted" if row.fitted else ""
        figures = f"{row.published:9.2f} {row.ours:9.2f} {row.error:+7.1%}"
        print(f"{row.source:18} {row.setting:38} {figures} {mark}")


if __name__ == "__main__":
    main()
