"""Why `pilot` is short of the filtering oracle: its parts, replaced one after another by the truth.

Each part is measured with those before it replaced already, so that they multiply to the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parlay.sim.rate import settled
from parlay.sim.rows import NONE
from parlay.sim.scenario import Scenario
from parlay.sim.simulate import Job, run_all
from parlay.sim.speed import Speed, stages_of

PILOT, ON_TIME = "pilot", "pilot on time"
CHAIN: Mapping[str, str] = {
    "probing: the guard": "pilot:guard=false",
    "allocation: needs, warm-up": "goodput",
    "estimation": "told_hazards",
    "cost model": "told_all",
    "probing: tries": "told_all_no_tries",
    "allocation: the rest": "filtering_oracle",
}
"""What each part is called, and who plays without its fault. The rest of the allocation is what the
oracle's slower search and its long-run worth of a token bring."""
DELAY = "delay"


@dataclass(slots=True, frozen=True)
class Part:
    """By how much goodput grows without one fault, with the 95% interval of that ratio.

    delay stands for itself: `pilot` with plans on time, which the oracle does not have either.
    """

    scenario: str
    part: str
    ratio: float
    ci95: tuple[float, float]


def decompose(
    scenario: Scenario,
    seeds: Sequence[int],
    steps: int,
    workers: int,
    started: Callable[[int], None] = lambda total: None,
    done: Callable[[Job], None] = lambda job: None,
) -> list[Part]:
    """Return the parts of what `pilot` lacks; raises ValueError where a recording is replayed."""
    if scenario.replays:
        raise ValueError("a recording has no oracle: --decompose needs a scenario's own tasks")
    short = settled(scenario).shortened(steps)
    late = bool(scenario.plan_delay_steps)
    players = [NONE, PILOT, *CHAIN.values()]
    jobs = [Job(short, name, seed, steps) for name in players for seed in seeds]
    on_time = dataclasses.replace(short, plan_delay_steps=0)
    more = [Job(on_time, PILOT, seed, steps) for seed in seeds] if late else []
    started(len(jobs) + len(more))
    found = run_all(jobs, workers, done)
    # One list runs on one scenario.
    found += run_all(more, workers, done) if late else []
    if late:
        players.append(ON_TIME)
    n = len(seeds)
    own = {name: found[i * n : (i + 1) * n] for i, name in enumerate(players)}
    speed = Speed(stages_of(short, steps), own[NONE])

    def part(name: str, before: str, after: str) -> Part:
        ratio = speed(own[after]) / speed(own[before])
        return Part(scenario.name, name, ratio, speed.interval(own[after], own[before]))

    befores = [PILOT, *CHAIN.values()][:-1]
    parts = [part(name, b, CHAIN[name]) for name, b in zip(CHAIN, befores, strict=True)]
    if late:
        parts.append(part(DELAY, PILOT, ON_TIME))
    return parts
