"""What the engines of `parlay bench engine` decode, and what each took for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from parlay.engine.bench import Timing
from parlay.engine.demo.prompts import DemoPrompt
from parlay.engine.demo.workload import CONCURRENCIES, Shape, cells_of, output_lengths


@dataclass(slots=True, frozen=True)
class Load:
    """Requests in order of arrival, so many at once: as one ends the next comes in.

    prompts: token ids; lengths: most output tokens; tasks: one tag each.
    """

    concurrency: int
    prompts: list[list[int]]
    lengths: list[int]
    tasks: list[str]

    @property
    def tokens(self) -> int:
        """Return the output tokens of all requests, at most."""
        return sum(self.lengths)


@dataclass(slots=True, frozen=True)
class Answer:
    """What an engine did with a load: wall seconds, each request's times, peak memory in MB.

    peak_memory_mb: of the engine's whole process; None where the system does not tell.
    """

    seconds: float
    timings: list[Timing]
    peak_memory_mb: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Return emitted tokens a second, prompts' time included."""
        return sum(t.tokens for t in self.timings) / self.seconds


Decode = Callable[[Load], Answer]


@dataclass(slots=True, frozen=True)
class Entrant:
    """An engine in one mode. settings: what it was set to, by concurrency it takes part in."""

    engine: str
    mode: str
    settings: Mapping[int, str]
    decode: Decode


def mixed_loads(
    prompts: Sequence[DemoPrompt],
    prompt_ids: Sequence[list[int]],
    output_tokens: int,
    requests: Mapping[int, int],
) -> list[Load]:
    """Return the demo's mixed cell at each concurrency.

    output_tokens: the mean of a request's most; requests: how many by concurrency.
    """
    nothing = dict.fromkeys(CONCURRENCIES, 0)
    cells = cells_of(prompts, Shape(1, output_tokens, nothing, requests))
    lengths = output_lengths(prompts, output_tokens)
    return [
        Load(
            cell.concurrency,
            [prompt_ids[i] for i in cell.prompts],
            [lengths[i] for i in cell.prompts],
            [prompts[i].task for i in cell.prompts],
        )
        for cell in cells
        if cell.mixed
    ]


def row_of(entrant: Entrant, concurrency: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the report's row over all rounds: tokens a second, medians of a request's times.

    A request of one token has no time a token after the first; tpot_ms is None if all are such.
    """
    timings = [t for a in answers for t in a.timings]
    later = [t.tpot_s for t in timings if t.tokens > 1]
    peaks = [a.peak_memory_mb for a in answers if a.peak_memory_mb is not None]
    return {
        "engine": entrant.engine,
        "mode": entrant.mode,
        "concurrency": concurrency,
        "setting": entrant.settings[concurrency],
        "tokens_per_s": sum(t.tokens for t in timings) / sum(a.seconds for a in answers),
        "tokens_per_s_by_round": [a.tokens_per_s for a in answers],
        "ttft_ms": 1e3 * median(t.ttft_s for t in timings),
        "tpot_ms": 1e3 * median(later) if later else None,
        "peak_memory_mb": max(peaks) if peaks else None,
    }
