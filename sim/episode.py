"""One policy through one scenario: the engine's loop on the simulator's backend, and what came out.

Closed loops keep a number of requests running; open loops let them come as they come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams, SpeculationParams
from parlay.engine.step import Engine, EngineConfig
from parlay.policies.policy import EngineLimits, Policy
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome
from parlay.sim.backend import SimBackend
from parlay.sim.costs import CostModel, load_costs
from parlay.sim.feed import Arrivals, Feed
from parlay.sim.load import luck_of
from parlay.sim.noted import NotedPlanner
from parlay.sim.prompts import prompt_of
from parlay.sim.scenario import Scenario
from parlay.sim.tally import Episode, Tally
from parlay.sim.workload import Arrival

K_MAX = 8
TOKEN_BUDGET = 2048
BLOCK_TOKENS = 16
PLENTY_BLOCKS = 1 << 18

MakePolicy = Callable[[EngineLimits, SimBackend], Policy]
"""Makes a policy for an engine; oracles look at the backend, others do not."""


class LatePlanner:
    """Runs a policy in process, but hands each plan out `delay` steps after it was made."""

    def __init__(self, policy: Policy, delay: int) -> None:
        self.policy = policy
        self._made: deque[Plan] = deque(maxlen=delay + 1)

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        """Decide now, return what was decided then."""
        self._made.append(self.policy.decide(view))
        full = len(self._made) == self._made.maxlen
        return (self._made[0], PlanSource.REMOTE) if full else (None, PlanSource.DEFAULT)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn now."""
        self.policy.observe(outcome)

    def close(self) -> None:
        """Nothing to let go of."""


def run_episode(
    scenario: Scenario,
    make: MakePolicy,
    arrivals: Arrivals,
    seed: int,
    steps: int | None = None,
) -> Episode:
    """Run every fresh start of a scenario and add them up.

    arrivals(stage, seed) yields the requests of a stage; where they end, so does the start. steps:
    measured steps instead of the scenario's. Raises ValueError where a trace ends in the warm-up.
    """
    costs = load_costs(scenario.costs)
    found = Episode()
    for run in range(scenario.runs):
        start = _Run(scenario, make, arrivals, 1000 * seed + run, costs, found)
        start.go(steps or scenario.steps)
    return found


def set_up(
    scenario: Scenario, make: MakePolicy, seed: int, costs: CostModel
) -> tuple[SimBackend, NotedPlanner]:
    """Return the backend of one start, and its policy behind the scenario's delay."""
    luck, index, known = luck_of(scenario, K_MAX, seed)
    limits = EngineLimits(known, K_MAX, tuple(costs.bucket_edges), TOKEN_BUDGET)
    backend = SimBackend(luck, costs, limits, index, scenario.catches_up)
    policy, delay = make(limits, backend), scenario.plan_delay_steps
    planner = LatePlanner(policy, delay) if delay else LocalPlanner(policy)
    return backend, NotedPlanner(planner, backend)


def ended_early(scenario: Scenario, episode: Episode) -> None:
    """Refuse a start that measured nothing."""
    if not episode.steps:
        raise ValueError(
            f"{scenario.name}: the trace ended within the {scenario.warm_up_steps} steps of"
            " warm-up: give a longer one, or fewer requests at once"
        )


class _Run:
    """One start: an engine, where its requests come from, and where the figures go."""

    def __init__(
        self,
        scenario: Scenario,
        make: MakePolicy,
        arrivals: Arrivals,
        seed: int,
        costs: CostModel,
        into: Episode,
    ) -> None:
        self.scenario, self.into = scenario, into
        self.feed = Feed(scenario, arrivals, seed)
        self.backend, self.planner = set_up(scenario, make, seed, costs)
        self.engine = Engine(self.backend, self.planner, self._config())

    def _config(self) -> EngineConfig:
        blocks, s = PLENTY_BLOCKS, self.scenario
        if s.kv_requests:
            known = [s.catalogue[tag] for tag in s.tasks]
            full = [sum(np.exp(np.log(m) + g) for m, g in (t.prompt, t.output)) for t in known]
            blocks = int(s.kv_requests * max(full) / BLOCK_TOKENS)
        return EngineConfig(
            max_running=s.most_running,
            token_budget=TOKEN_BUDGET,
            block_tokens=BLOCK_TOKENS,
            target_blocks=blocks,
            draft_blocks=blocks,
            context_tokens=1 << 20,
            # A draft that need not catch up is never more than the last token behind.
            draft_window_tokens=1 << 20 if s.catches_up else 1,
            prefix_cache=s.prefix_cache,
        )

    def go(self, steps: int) -> None:
        """Run warm-up and the measured steps, or until the trace is over."""
        backend, engine = self.backend, self.engine
        tally = Tally(self.into, self.scenario.warm_up_steps, steps, self.feed.served(steps))
        over = False
        while not over:
            there = len(engine.scheduler.running) + len(engine.scheduler.waiting)
            came, backend.time_s = self.feed.due(tally.step, backend.time_s, there)
            for arrival, arrived_s in came:
                self._add(arrival, arrived_s, tally)
            outcome = engine.step()
            if outcome is None:
                assert self.feed.ended, "a loop always has work"
                break
            over = tally.note(outcome, backend.time_s, self.planner)
        ended_early(self.scenario, self.into)

    def _add(self, arrival: Arrival, arrived_s: float, tally: Tally) -> None:
        request = self.engine.add(
            prompt_of(arrival, tally.requests)
            if self.scenario.prefix_cache
            # Without a cache of prefixes prompts are lengths without text.
            else range(arrival.prompt_tokens),
            SamplingParams(max_tokens=arrival.output_tokens),
            SpeculationParams(task=arrival.task),
        )
        room = self.engine.config.positions - arrival.prompt_tokens
        tally.came(request.request_id, arrived_s, min(arrival.output_tokens, room))
