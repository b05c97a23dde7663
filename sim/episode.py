"""One policy through one scenario: the engine's loop on the simulator's backend, and what came out.

Closed loops keep a number of requests running; open loops let them come as they come.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.step import Engine, EngineConfig
from parlay.policies.policy import EngineLimits, Policy
from parlay.policies.types import PROPOSERS, Array, BatchView, Plan, PlanSource, StepOutcome
from parlay.sim.backend import SimBackend
from parlay.sim.costs import CostModel, load_costs
from parlay.sim.load import luck_of
from parlay.sim.scenario import Scenario, Stage
from parlay.sim.workload import Arrival

K_MAX = 8
TOKEN_BUDGET = 2048
BLOCK_TOKENS = 16
_PLENTY_BLOCKS = 1 << 18
_BUCKETS, _SAMPLE = 200, 2000

MakePolicy = Callable[[EngineLimits, SimBackend], Policy]
"""Makes a policy for an engine; oracles look at the backend, others do not."""


@dataclass(slots=True)
class Episode:
    """What a policy made of a scenario, warm-up left out.

    tokens emitted, step_s the time of the steps and draft_s of it for drafting. By request that
    ended: ttft_s, tpot_ms. By stretch of steps [_BUCKETS]: tokens, time, tokens verified (k), and
    rows by proposer [_BUCKETS, PROPOSERS].
    """

    tokens: int = 0
    step_s: float = 0.0
    steps: int = 0
    draft_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    bucket_tokens: Array = field(default_factory=lambda: np.zeros(_BUCKETS))
    bucket_s: Array = field(default_factory=lambda: np.zeros(_BUCKETS))
    bucket_k: Array = field(default_factory=lambda: np.zeros(_BUCKETS))
    bucket_rows: Array = field(default_factory=lambda: np.zeros((_BUCKETS, PROPOSERS)))

    @property
    def goodput(self) -> float:
        """Return emitted tokens per second of step time."""
        return self.tokens / self.step_s if self.step_s else 0.0


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
    arrivals: Callable[[Stage, int], Iterator[Arrival]],
    seed: int,
    steps: int | None = None,
) -> Episode:
    """Run every fresh start of a scenario and add them up.

    arrivals(stage, seed) yields the requests of a stage without end. steps: measured steps instead
    of the scenario's.
    """
    costs = load_costs(scenario.costs)
    found = Episode()
    for run in range(scenario.runs):
        start = _Run(scenario, make, arrivals, 1000 * seed + run, costs, found)
        start.go(steps or scenario.steps)
    return found


class _Run:
    """One start: an engine, where its requests come from, and where the figures go."""

    def __init__(
        self,
        scenario: Scenario,
        make: MakePolicy,
        arrivals: Callable[[Stage, int], Iterator[Arrival]],
        seed: int,
        costs: CostModel,
        into: Episode,
    ) -> None:
        self.scenario, self.seed, self.into = scenario, seed, into
        self.arrivals = arrivals
        luck, index, known = luck_of(scenario, K_MAX, seed)
        limits = EngineLimits(known, K_MAX, tuple(costs.bucket_edges), TOKEN_BUDGET)
        self.backend = SimBackend(luck, costs, limits, index, scenario.catches_up)
        policy = make(limits, self.backend)
        delay = scenario.plan_delay_steps
        planner: Planner = LatePlanner(policy, delay) if delay else LocalPlanner(policy)
        self.engine = Engine(self.backend, planner, self._config())
        self._sources: dict[int, Iterator[Arrival]] = {}
        self._live: dict[int, tuple[Request, float]] = {}
        self._first_s: dict[int, float] = {}
        self._next: Arrival | None = None
        self._ended = 0

    def _config(self) -> EngineConfig:
        blocks, s = _PLENTY_BLOCKS, self.scenario
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
            # Prompts are lengths without text.
            prefix_cache=False,
        )

    def go(self, steps: int) -> None:
        """Run warm-up and the measured steps.

        An open loop ends with the requests that plain decoding would serve in as many steps:
        steps of a faster policy would be other requests' steps, longer or shorter.
        """
        warm_up, served = self.scenario.warm_up_steps, self._requests(steps)
        for step in itertools.count():
            self._admit(self.scenario.stage_at(step))
            outcome = self.engine.step()
            assert outcome is not None, "a loop always has work"
            gone = self._ended / served if served else (step - warm_up) / steps
            self._note(outcome, step >= warm_up, min(int(gone * _BUCKETS), _BUCKETS - 1))
            if self._ended >= served if served else step >= warm_up + steps - 1:
                return

    def _requests(self, steps: int) -> int:
        """Return how many requests an open loop serves; 0 for a closed one."""
        if not self.scenario.arrivals:
            return 0
        tokens = steps * float(self.scenario.arrivals["mean_concurrency"])
        some = itertools.islice(self.arrivals(self.scenario.stages[0], self.seed), _SAMPLE)
        lengths = [arrival.output_tokens for arrival in some]
        return max(1, round(tokens / float(np.mean(lengths))))

    def _admit(self, stage: Stage) -> None:
        """Add what the load asks for; an idle open loop waits for its next request."""
        if stage.concurrency:
            scheduler = self.engine.scheduler
            while len(scheduler.running) + len(scheduler.waiting) < stage.concurrency:
                self._add(next(self._source(stage)), self.backend.time_s)
            return
        while True:
            self._next = self._next or next(self._source(stage))
            if self._next.arrival_s > self.backend.time_s:
                if self.engine.has_work:
                    return
                self.backend.time_s = self._next.arrival_s
            self._add(self._next, self._next.arrival_s)
            self._next = None

    def _source(self, stage: Stage) -> Iterator[Arrival]:
        return self._sources.setdefault(id(stage), self.arrivals(stage, self.seed))

    def _add(self, arrival: Arrival, now_s: float) -> None:
        request = self.engine.add(
            range(arrival.prompt_tokens),
            SamplingParams(max_tokens=arrival.output_tokens),
            SpeculationParams(task=arrival.task),
        )
        self._live[request.request_id] = (request, now_s)

    def _note(self, outcome: StepOutcome, measured: bool, bucket: int) -> None:
        now_s, into = self.backend.time_s, self.into
        if measured:
            emitted, step_s = int(outcome.emitted.sum()), 1e-3 * outcome.step_ms
            into.tokens += emitted
            into.step_s += step_s
            into.steps += 1
            into.draft_s += 1e-3 * float(outcome.draft_ms.sum())
            into.bucket_tokens[bucket] += emitted
            into.bucket_s[bucket] += step_s
            into.bucket_k[bucket] += int(outcome.verified_k.sum())
            into.bucket_rows[bucket] += np.bincount(outcome.proposer, minlength=PROPOSERS)
        for row in np.flatnonzero(outcome.emitted):
            key = int(outcome.request_id[row])
            request, arrived_s = self._live[key]
            if key not in self._first_s:
                self._first_s[key] = now_s
            if request.finished:
                first_s = self._first_s.pop(key)
                del self._live[key]
                self._ended += 1
                if measured:
                    into.ttft_s.append(first_s - arrived_s)
                    if request.output_tokens > 1:
                        tpot_s = (now_s - first_s) / (request.output_tokens - 1)
                        into.tpot_ms.append(1e3 * tpot_s)
