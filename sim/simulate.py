"""Policies against one another on scenarios: paired seeds, ratios and their intervals.

Every policy of a scenario meets the same requests, phases and coins. The statics that a policy is
compared with are tuned on other seeds than those they are judged on.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from parlay.policies.policy import EngineLimits, Policy, make_policy
from parlay.sim.backend import SimBackend
from parlay.sim.episode import MakePolicy, run_episode
from parlay.sim.filtering import filtering_oracle
from parlay.sim.keyed import fits, run_side_by_side
from parlay.sim.load import arrivals_of
from parlay.sim.oracle import clairvoyant, hazard_oracle
from parlay.sim.rate import settled
from parlay.sim.rows import BEST_GATE, BEST_STATIC, NINE_IN_TEN, NONE, Row, Slo, rows_of
from parlay.sim.scenario import Scenario
from parlay.sim.speed import Speed, stages_of
from parlay.sim.tally import Episode
from parlay.sim.told import TOLD

ORACLES: Mapping[str, Callable[[SimBackend, EngineLimits], Policy]] = {
    "clairvoyant": clairvoyant,
    "filtering_oracle": filtering_oracle,
    "hazard_oracle": hazard_oracle,
}
_KNOWING: Mapping[str, Callable[[SimBackend, EngineLimits], Policy]] = {**ORACLES, **TOLD}
_STATICS = [
    f"fixed:proposer={proposer}/k={k}"
    for proposer, most in (("ngram", 8), ("draft_model", 8), ("medusa", 4))
    for k in range(1, most + 1)
]
_GATES = [
    f"ngram_gate:min_match={m}/k_ngram={n}/k_draft={d}"
    for m in (1, 2, 4, 5, 6)
    for n in (3, 5, 8)
    for d in (0, 1, 2, 3, 4)
]
_TUNING_SEED = 1_000_003
_TUNING_STEPS = (150, 600)
_TUNING_WARM_UP, _KEPT = 50, 6
_AT_ONCE = 8
"""Episodes side by side; more are hardly quicker, and news of them comes later."""


@dataclass(slots=True, frozen=True)
class Job:
    """One episode to run: a policy as `name` or `name:key=value/key=value`."""

    scenario: Scenario
    policy: str
    seed: int
    steps: int


def parse_policy(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:key=value/key=value`; raises ValueError where it is malformed."""
    name, _, rest = text.partition(":")
    settings: dict[str, str] = {}
    # A slash within a value, as in a path, parts nothing.
    for part in filter(None, re.split(r"/(?=\w+=)", rest)):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"policy '{text}': write settings as name:key=value/key=value")
        settings[key] = value
    return name, settings


def maker(text: str) -> MakePolicy:
    """Return what makes a policy or an oracle; raises ValueError where it is unknown."""
    name, settings = parse_policy(text)
    if name in _KNOWING:
        if settings:
            raise ValueError(f"{name} has no settings")
        oracle = _KNOWING[name]
        return lambda limits, backend: oracle(backend, limits)
    make_policy(name, settings)
    return lambda limits, _: make_policy(name, settings, limits)


def run_jobs(jobs: Sequence[Job]) -> list[Episode]:
    """Run episodes of one scenario and length: side by side, where the engine's blocks are plenty.

    Either way they are the same to the last digit.
    """
    scenario, steps = jobs[0].scenario, jobs[0].steps
    makes, arrivals = [maker(job.policy) for job in jobs], arrivals_of(scenario)
    seeds = [job.seed for job in jobs]
    if fits(scenario):
        return run_side_by_side(scenario, makes, arrivals, seeds, steps)
    return [
        run_episode(scenario, make, arrivals, seed, steps)
        for make, seed in zip(makes, seeds, strict=True)
    ]


def run_all(
    jobs: Sequence[Job], workers: int, done: Callable[[Job], None] = lambda job: None
) -> list[Episode]:
    """Run jobs of one scenario and length on processes of their own; done is told of each."""
    parts = _parts(jobs, max(workers, 1))
    if workers <= 1:
        found = []
        for part in parts:
            found += run_jobs(part)
            for job in part:
                done(job)
        return found
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        futures = [pool.submit(run_jobs, part) for part in parts]
        place = dict(zip(futures, parts, strict=True))
        try:
            for future in as_completed(futures):
                future.result()
                for job in place[future]:
                    done(job)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [episode for future in futures for episode in future.result()]


def _parts(jobs: Sequence[Job], workers: int) -> list[Sequence[Job]]:
    """Return jobs in parts that a process runs at once: enough for all, and none too large."""
    size = min(-(-len(jobs) // workers), _AT_ONCE) if fits(jobs[0].scenario) else 1
    return [jobs[i : i + size] for i in range(0, len(jobs), size)]


def tune(scenario: Scenario, choices: Sequence[str], workers: int) -> str:
    """Return the choice with the most goodput on a seed that nobody is judged on.

    Successive halving: all choices over few steps, the best over more. Stages are made as much
    shorter as the run, so that a changing load is seen whole.
    """
    left = list(choices)
    for steps in _TUNING_STEPS:
        # Else a stage would be little more than the prompts that it begins with.
        short = scenario.shortened(min(steps * len(scenario.stages), scenario.steps))
        # Statics learn nothing: their warm-up only mixes the requests' ages.
        warm_up = min(scenario.warm_up_steps, _TUNING_WARM_UP)
        short = dataclasses.replace(short, runs=1, warm_up_steps=warm_up)
        jobs = [Job(short, choice, _TUNING_SEED, short.steps) for choice in (NONE, *left)]
        none, *found = run_all(jobs, workers)
        speed = Speed(stages_of(short, short.steps), [none])
        speeds = [speed([episode]) for episode in found]
        ranked = sorted(zip(speeds, left, strict=True), reverse=True)
        left = [choice for _, choice in ranked[:_KEPT]]
    return left[0]


def judge(
    scenario: Scenario,
    policies: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    workers: int,
    started: Callable[[int], None] = lambda total: None,
    done: Callable[[Job], None] = lambda job: None,
    slo: Slo = NINE_IN_TEN,
) -> tuple[list[Row], dict[str, list[Episode]]]:
    """Run policies on a scenario over paired seeds; return their rows and their episodes.

    `none`, the tuned statics and the oracles that shares refer to are run besides. started is told
    how many episodes there are once the statics are tuned, done of each that ended.
    """
    scenario = settled(scenario)
    named = {
        BEST_STATIC: tune(scenario, _STATICS, workers),
        BEST_GATE: tune(scenario, _GATES, workers),
    }
    oracles = ["clairvoyant"] if scenario.replays else sorted(ORACLES)
    asked = dict.fromkeys([NONE, BEST_STATIC, BEST_GATE, *policies, *oracles])
    short = scenario.shortened(steps)
    keys = [(name, seed) for name in asked for seed in seeds]
    jobs = [Job(short, named.get(name, name), seed, steps) for name, seed in keys]
    started(len(jobs))
    found = dict(zip(keys, run_all(jobs, workers, done), strict=True))
    episodes = {name: [found[name, seed] for seed in seeds] for name in asked}
    speed = Speed(stages_of(short, steps), episodes[NONE])
    promised = slo.filled(episodes[NONE])
    return rows_of(scenario.name, episodes, speed, promised, named), episodes
