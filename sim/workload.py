"""Requests as they come: who asks for what, when, and how long it is.

A workload is a lazy iterator of arrivals in order of time. Tasks and lengths are drawn by the
arrival's index, never by its time: the same seed asks for the same work at any load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from math import inf, nan
from typing import Protocol, Self

import numpy as np

from parlay.policies.types import Array
from parlay.sim.arrivals import BLOCK, Quantiles, Stream, Times, draws, normals

BLOCK_TOKENS = 512
"""Tokens that one of an arrival's blocks stands for, as in Mooncake's traces."""
_SAMPLE = 100_000
"""Most arrivals that are held at once, to measure a workload."""


@dataclass(slots=True, frozen=True)
class Arrival:
    """One request as it comes: arrival_s from the workload's start, task tag, prompt and output
    tokens, and how many of the prompt's first tokens an earlier request had too (prefix reuse);
    blocks: what a trace calls the blocks of BLOCK_TOKENS that the prompt begins with.
    """  # noqa: D205

    arrival_s: float
    task: str
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0
    blocks: tuple[int, ...] = ()


Workload = Iterator[Arrival]


class Sizes(Protocol):
    """How long requests are."""

    def draw(self, seed: int, block: int) -> Array:
        """Return i64 [3, BLOCK]: prompt, output and shared prefix tokens."""
        ...


@dataclass(slots=True, frozen=True)
class Lengths:
    """Prompt and output tokens, independent of each other.

    shared: tokens of a prefix that earlier requests had too; `prompt` then counts what follows it.
    """

    prompt: Quantiles
    output: Quantiles
    shared: Quantiles | None = None

    @classmethod
    def log_normal(cls, prompt: Sequence[float], output: Sequence[float]) -> Self:
        """Return log-normal lengths, each (median, sigma, least, most)."""
        return cls(Quantiles.log_normal(*prompt), Quantiles.log_normal(*output))

    @classmethod
    def empirical(cls, workload: Iterable[Arrival], most: int = _SAMPLE) -> Self:
        """Return the lengths of a workload's first arrivals, at most so many."""
        seen = _columns(workload, most)
        return cls(Quantiles.of_sample(seen[1]), Quantiles.of_sample(seen[2]))

    def draw(self, seed: int, block: int) -> Array:
        """Return i64 [3, BLOCK]: prompt, output and shared prefix tokens."""
        shared = np.zeros(BLOCK, np.int64)
        if self.shared is not None:
            shared = _tokens(self.shared, seed, Stream.SHARED, block)
        prompt = shared + _tokens(self.prompt, seed, Stream.PROMPT, block)
        return np.stack([prompt, _tokens(self.output, seed, Stream.OUTPUT, block), shared])


@dataclass(slots=True, frozen=True)
class MixedLengths:
    """Lengths of several kinds of request: shares [n] above 0, and each kind's lengths [n]."""

    shares: tuple[float, ...]
    kinds: tuple[Sizes, ...]

    def draw(self, seed: int, block: int) -> Array:
        """Return i64 [3, BLOCK]: prompt, output and shared prefix tokens."""
        kind = _chosen(self.shares, seed, Stream.KIND, block)
        return _picked(self.kinds, kind, seed, block)


def closed_loop(
    mix: Mapping[str, float], lengths: Sizes | Mapping[str, Sizes], seed: int
) -> Workload:
    """Return endless arrivals at 0 s, of which the simulator takes as many as it has room for.

    mix: each task's share; lengths: of all tasks, or of each. Raises ValueError where they do not
    fit.
    """
    return open_loop((np.zeros(BLOCK) for _ in count()), mix, lengths, seed)


def open_loop(
    times: Times, mix: Mapping[str, float], lengths: Sizes | Mapping[str, Sizes], seed: int
) -> Workload:
    """Return arrivals at the times of a process, with tasks and lengths as in `closed_loop`."""
    tasks = _shares(mix)
    of_task = {t: lengths[t] for t in tasks if t in lengths} if isinstance(lengths, Mapping) else {}
    if isinstance(lengths, Mapping) and len(of_task) < len(tasks):
        raise ValueError(f"lengths of {sorted(lengths)} do not cover the tasks {sorted(tasks)}")
    kinds = [lengths] if not isinstance(lengths, Mapping) else [of_task[t] for t in tasks]
    return _arrivals(times, tasks, kinds, seed)


def _arrivals(
    times: Times, tasks: Mapping[str, float], kinds: Sequence[Sizes], seed: int
) -> Workload:
    names = list(tasks)

    def rows() -> Iterator[list[int]]:
        for block in count():
            task = _chosen(tuple(tasks.values()), seed, Stream.TASK, block)
            sizes = _picked(kinds, task if len(kinds) > 1 else np.zeros_like(task), seed, block)
            yield from np.vstack([task, sizes]).T.tolist()

    clock = chain.from_iterable(block.tolist() for block in times)
    for time_s, (task, prompt, output, shared) in zip(clock, rows(), strict=False):
        yield Arrival(time_s, names[task], prompt, output, shared)


def assigned(workload: Iterable[Arrival], mix: Mapping[str, float], seed: int) -> Workload:
    """Return a workload whose arrival i has a task drawn by (seed, i)."""
    tasks = _shares(mix)
    names, shares = list(tasks), tuple(tasks.values())
    blocks = (_chosen(shares, seed, Stream.TASK, b).tolist() for b in count())
    drawn = chain.from_iterable(blocks)
    return (replace(a, task=names[next(drawn)]) for a in workload)


def at_once(workload: Iterable[Arrival]) -> Workload:
    """Return a workload all of whose requests wait at 0 s: a closed loop of a trace's requests."""
    return (replace(a, arrival_s=0.0) for a in workload)


def scaled(workload: Iterable[Arrival], factor: float) -> Workload:
    """Return a workload whose rate is `factor` times as high."""
    if not 0.0 < factor < inf:
        raise ValueError(f"a rate can be scaled by a factor above 0, not by {factor}")
    return (replace(a, arrival_s=a.arrival_s / factor) for a in workload)


def to_concurrency(
    make: Callable[[], Iterable[Arrival]],
    target: float,
    residence_s: Callable[[int], float],
    most: int = _SAMPLE,
) -> Workload:
    """Return a workload scaled so that on average `target` requests are in the house.

    Little's law: concurrency = arrivals a second x mean stay. `residence_s` gives the stay of a
    request by its output tokens; rate and stay are measured on the first `most` arrivals of one
    `make()`, then another is scaled.
    """
    now = concurrency(make(), residence_s, most)
    if not (0.0 < target < inf and 0.0 < now < inf):
        raise ValueError(f"cannot scale a mean concurrency of {now:g} to {target:g}")
    return scaled(make(), target / now)


def concurrency(
    workload: Iterable[Arrival], residence_s: Callable[[int], float], most: int = _SAMPLE
) -> float:
    """Return how many requests are in the house on average; infinite if all come at once."""
    time_s, _, output, _ = _columns(workload, most)
    if len(time_s) < 2:
        raise ValueError(f"{len(time_s)} arrivals have no rate; give two or more")
    stay_s = float(np.mean([residence_s(int(n)) for n in output]))
    span_s = float(time_s[-1] - time_s[0])
    return (len(time_s) - 1) / span_s * stay_s if span_s else inf


@dataclass(slots=True, frozen=True)
class Summary:
    """What a workload is like: nan where all arrivals come at once."""

    count: int
    rate_per_s: float
    gap_cv: float
    prompt_p50: float
    prompt_p99: float
    output_p50: float
    output_p99: float
    shared_prefix_share: float
    """Of all prompt tokens, which share earlier requests had too."""
    tasks: Mapping[str, float]


def describe(workload: Iterable[Arrival], most: int = _SAMPLE) -> Summary:
    """Return the figures of a workload's first arrivals; raises ValueError if there is none."""
    tasks: Counter[str] = Counter()

    def counted() -> Workload:
        for arrival in workload:
            tasks[arrival.task] += 1
            yield arrival

    time_s, prompt, output, shared = _columns(counted(), most)
    gaps = np.diff(time_s)
    mean_s = float(gaps.mean()) if gaps.any() else nan
    (prompt_p50, prompt_p99), (output_p50, output_p99) = (
        np.quantile(n, [0.5, 0.99]).tolist() for n in (prompt, output)
    )
    return Summary(
        count=len(prompt),
        rate_per_s=1.0 / mean_s,
        gap_cv=float(gaps.std()) / mean_s,
        prompt_p50=prompt_p50,
        prompt_p99=prompt_p99,
        output_p50=output_p50,
        output_p99=output_p99,
        shared_prefix_share=float(shared.sum() / prompt.sum()),
        tasks={task: n / len(prompt) for task, n in sorted(tasks.items())},
    )


def dispersion(times_s: Array, window_s: float) -> float:
    """Return the variance over the mean of arrivals in a window: 1 for Poisson, more for bursts."""
    windows = np.floor((times_s - times_s[0]) / window_s).astype(np.int64)
    counts = np.bincount(windows)[:-1]
    if len(counts) < 2:
        raise ValueError(f"the arrivals span fewer than two windows of {window_s:g} s")
    return float(counts.var() / counts.mean())


def _columns(workload: Iterable[Arrival], most: int) -> Array:
    rows = [
        (a.arrival_s, a.prompt_tokens, a.output_tokens, a.shared_prefix_tokens)
        for a in islice(workload, most)
    ]
    if not rows:
        raise ValueError("the workload has no arrivals; give one that has")
    return np.array(rows, float).T


def _tokens(lengths: Quantiles, seed: int, stream: Stream, block: int) -> Array:
    drawn = np.rint(lengths.at(normals(seed, stream, block * BLOCK, BLOCK)))
    return np.maximum(drawn, 1.0).astype(np.int64)


def _shares(mix: Mapping[str, float]) -> dict[str, float]:
    kept = {task: share for task, share in sorted(mix.items()) if share}
    if not kept or not all(0.0 < share < inf for share in kept.values()):
        raise ValueError(f"a mix needs shares of 0 or more, not all 0, and not {dict(mix)}")
    return kept


def _chosen(shares: Sequence[float], seed: int, stream: Stream, block: int) -> Array:
    edges = np.cumsum(shares)
    drawn = draws(seed, stream, block).random(BLOCK) * edges[-1]
    found: Array = np.minimum(np.searchsorted(edges, drawn, side="right"), len(shares) - 1)
    return found


def _picked(kinds: Sequence[Sizes], kind: Array, seed: int, block: int) -> Array:
    drawn = np.stack([sizes.draw(seed, block) for sizes in kinds])
    found: Array = drawn[kind, :, np.arange(BLOCK)].T
    return found
