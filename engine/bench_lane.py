"""Our engine under one policy, and the best of several settings, for `parlay bench engine`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parlay.engine.bench import Timing
from parlay.engine.bench_load import Answer, Decode, Entrant, Load
from parlay.engine.bench_memory import peak_mb, reset_peak
from parlay.engine.demo.modes import STATICS, Mode
from parlay.engine.demo.stats import ADAPTIVE, NONE
from parlay.engine.request import OnTokens, Request, SamplingParams, SpeculationParams
from parlay.engine.sparing import SparingPlanner
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies import DEFAULT_POLICY
from parlay.policies.policy import make_policy

PARLAY = "parlay"
BEST_STATIC, GATE = "best_static", "gate"
POLICIES = {NONE: "none", ADAPTIVE: DEFAULT_POLICY}


def _gate(min_match: int, k_ngram: int, k_draft: int) -> Mode:
    settings = {"min_match": min_match, "k_ngram": k_ngram, "k_draft": k_draft}
    return Mode(" ".join(f"{k}={v}" for k, v in settings.items()), "ngram_gate", settings)


CANDIDATES = {
    BEST_STATIC: tuple(m for m in STATICS if m.policy == "fixed"),
    GATE: (_gate(4, 7, 3), _gate(4, 7, 1), _gate(4, 7, 0), _gate(2, 5, 1)),
}
"""From which the best is chosen, mode by mode and concurrency by concurrency."""


def lane(
    backend: TorchBackend, eos_ids: Sequence[int], policy: str, settings: Mapping[str, Any]
) -> Decode:
    """Return our engine with a policy in this process; it learns on from load to load."""
    # Prompts come again, and shall cost what they did.
    config = replace(backend.config, prefix_cache=False)
    planner = SparingPlanner(make_policy(policy, settings, backend.limits()))
    engine = Engine(backend, planner, config, eos_ids=eos_ids)

    def decode(load: Load) -> Answer:
        pid = os.getpid()
        counted = reset_peak(pid)
        seconds, timings = _closed_loop(engine, load)
        return Answer(seconds, timings, peak_mb(pid) if counted else None)

    return decode


def _closed_loop(engine: Engine, load: Load) -> tuple[float, list[Timing]]:
    """Decode a load greedily; return wall seconds and each request's times."""
    waiting = list(range(len(load.prompts)))[::-1]
    requests: dict[int, Request] = {}
    added_s: dict[int, float] = {}
    seen_s: dict[int, list[float]] = {}

    def watch(index: int) -> OnTokens:
        def on_tokens(_: Request, __: list[int]) -> None:
            seen_s.setdefault(index, []).append(time.perf_counter())

        return on_tokens

    start_s = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and sum(not r.finished for r in requests.values()) < load.concurrency:
            at = waiting.pop()
            sampling = SamplingParams(max_tokens=load.lengths[at])
            added_s[at] = time.perf_counter()
            requests[at] = engine.add(
                load.prompts[at], sampling, SpeculationParams(task=load.tasks[at]), watch(at)
            )
        engine.step()
    seconds = time.perf_counter() - start_s
    return seconds, [
        Timing(seen_s[i][0] - added_s[i], seen_s[i][-1] - added_s[i], requests[i].output_tokens)
        for i in range(len(load.prompts))
    ]


def choose(
    lanes: Sequence[tuple[str, Decode]],
    mode: str,
    loads: Sequence[Load],
    on_done: Callable[[Load], None],
) -> Entrant:
    """Return the entrant that is, at each concurrency, the lane that decodes its load fastest.

    lanes: (setting, decode). This pass serves to choose only: the figures come from others.
    """
    best: dict[int, tuple[float, str, Decode]] = {}
    for load in loads:
        for name, decode in lanes:
            speed = decode(load).tokens_per_s
            on_done(load)
            if load.concurrency not in best or speed > best[load.concurrency][0]:
                best[load.concurrency] = speed, name, decode

    def decode_best(load: Load) -> Answer:
        return best[load.concurrency][2](load)

    return Entrant(PARLAY, mode, {c: name for c, (_, name, _) in best.items()}, decode_best)
