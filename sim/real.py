"""Sim to real: what policies gain as the simulator foretells it, beside what the engine measures.

One run of the engine gives step times, on which a cost model is fitted (`step_costs.py`); a
counterfactual trace gives acceptance; policies take as long as they take. Both the engine and the
simulator then play the same waves of requests, greedily and to the same lengths. Only steps without
prompts count: a prompt takes as long under every policy.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from parlay.engine.backend import Backend
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams, SpeculationParams
from parlay.engine.step import Engine, EngineConfig
from parlay.policies.baselines.rows import batch_plan
from parlay.policies.policy import EngineLimits, Policy, Stateless
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    NONE,
    BatchView,
    Plan,
    Proposer,
    StepOutcome,
)
from parlay.sim.backend import SimBackend
from parlay.sim.costs import CostModel
from parlay.sim.counterfactual import TracedRequest, TraceLuck
from parlay.sim.step_costs import StepCosts, StepLog, fit_costs

MakePolicy = Callable[[EngineLimits], Policy]
_SWEPT = ((NONE, 0), (NGRAM, 4), (DRAFT_MODEL, 1), (NGRAM, 8), (DRAFT_MODEL, 4), (NONE, 0),
          (DRAFT_MODEL, 2), (NGRAM, 16), (DRAFT_MODEL, 8))  # fmt: skip
"""What the run that costs are learned from drafts, in turn: (proposer, k) of every row."""
_HEADS = (MEDUSA, 2)
_HELD_STEPS = 12
"""Steps of one choice, which find the caches as its like leave them, as under a policy."""
_SWEEPS = 2
_COLD = 1 << 22
"""Numbers read before a policy is asked, 32 MiB: in an engine it finds its caches cold."""


@dataclass(slots=True, frozen=True)
class Ask:
    """One request: its prompt's token ids, its task, and how many tokens it emits."""

    prompt: Sequence[int]
    task: str
    output_tokens: int


@dataclass(slots=True, frozen=True)
class Compared:
    """One policy: tokens/s of every wave, round after round, foretold and measured."""

    policy: str
    foretold: list[float]
    measured: list[float]


@dataclass(slots=True, frozen=True)
class Agreement:
    """Gains over the first policy [policies - 1]: foretold, measured; their agreement.

    errors: foretold over measured, less 1. tau: Kendall's, of all policies' gains. repeat_tau and
    repeat_error: how one round of measuring agrees with another, the mean over pairs and the
    largest; more cannot be foretold. None of one round.
    """

    foretold: list[float]
    measured: list[float]
    errors: list[float]
    tau: float
    repeat_tau: float | None
    repeat_error: float | None


class Sweep(Stateless):
    """Drafts for some steps this, then that, for all rows alike, so that every cost is seen."""

    name = "sweep"

    def __init__(self, limits: EngineLimits) -> None:
        self.choices = [(p, min(k, limits.k_max)) for p, k in _SWEPT if limits.has(p)]
        if limits.has(MEDUSA):
            self.choices.append(_HEADS)

    def decide(self, view: BatchView) -> Plan:
        """Return the choice of this step for every row."""
        proposer, k = self.choices[view.step_id // _HELD_STEPS % len(self.choices)]
        return batch_plan(view, Proposer(proposer), k)


class Player:
    """A policy on an engine of its own, which goes on learning from wave to wave."""

    def __init__(
        self,
        backend: Backend,
        make: MakePolicy,
        config: EngineConfig,
        seen: Callable[[BatchView, StepOutcome], None] = lambda view, outcome: None,
    ) -> None:
        policy = _Watched(make(backend.limits()), seen)
        # What was read in an earlier round is not to be found in the next.
        config = dataclasses.replace(config, prefix_cache=False)
        self.engine = Engine(backend, LocalPlanner(policy), config)

    def play(self, asks: Iterable[Ask]) -> float:
        """Decode requests that come at once; return tokens/s of the steps without prompts."""
        tokens, ms = 0, 0.0
        for ask in asks:
            sampling = SamplingParams(max_tokens=ask.output_tokens)
            self.engine.add(ask.prompt, sampling, SpeculationParams(task=ask.task))
        while self.engine.has_work:
            outcome = self.engine.step()
            assert outcome is not None, "there is work"
            if not outcome.prefill_tokens:
                tokens += int(outcome.emitted.sum())
                ms += outcome.step_ms
        return 1e3 * tokens / ms


def waves(asks: Sequence[Ask], at_once: int) -> list[Sequence[Ask]]:
    """Cut requests into waves of `at_once`; what is left over at the end is left out."""
    return [asks[i : i + at_once] for i in range(0, len(asks) - at_once + 1, at_once)]


def learn_costs(
    backend: Backend, config: EngineConfig, parts: Sequence[Sequence[Ask]]
) -> StepCosts:
    """Return the cost model of a run of the engine that drafts for some steps this, then that."""
    log = StepLog()
    sweep = Player(backend, Sweep, config, log.add)
    for _ in range(_SWEEPS):
        for part in parts:
            sweep.play(part)
    return fit_costs(log, backend.limits().bucket_edges)


def simulated(costs: CostModel, recorded: list[TracedRequest], limits: EngineLimits) -> SimBackend:
    """Return the simulator's stand-in for an engine that decodes what was recorded, in order."""
    luck = TraceLuck(recorded, limits.k_max)
    index = {tag: i for i, tag in enumerate(dict.fromkeys(r.task for r in recorded))}
    limits = dataclasses.replace(limits, proposer_mask=limits.proposer_mask & luck.proposer_mask)
    return SimBackend(luck, costs, limits, index, catches_up=True)


def timed(make: MakePolicy, backend: SimBackend) -> MakePolicy:
    """Return policies whose own time the simulator's clock goes on by, as this machine takes it."""
    return lambda limits: _Timed(make(limits), backend)


def agreement(rows: Sequence[Compared], rounds: int = 1) -> Agreement:
    """Return how well gains foretold and measured agree.

    A gain is the median over waves of the ratio to the first policy in the same wave and round,
    which stand close in time: the machine may be slower in others.
    """
    foretold = [_gain(row.foretold, rows[0].foretold) for row in rows]
    measured = [_gain(row.measured, rows[0].measured) for row in rows]
    errors = [f / m - 1.0 for f, m in zip(foretold, measured, strict=True)]
    found = [[_gain(own, first) for own, first in each] for each in _by_round(rows, rounds)]
    pairs = list(itertools.combinations(np.array(found), 2))
    taus = [float(kendalltau(a, b).statistic) for a, b in pairs]
    return Agreement(
        foretold[1:],
        measured[1:],
        errors[1:],
        float(kendalltau(foretold, measured).statistic),
        float(np.mean(taus)) if pairs else None,
        max((float(np.abs(a / b - 1.0).max()) for a, b in pairs), default=None),
    )


def _by_round(
    rows: Sequence[Compared], rounds: int
) -> Iterator[list[tuple[Sequence[float], Sequence[float]]]]:
    """Yield what each policy measured in each round, and what the first did."""
    count = len(rows[0].measured) // rounds
    for start in range(0, rounds * count, count):
        part = slice(start, start + count)
        yield [(row.measured[part], rows[0].measured[part]) for row in rows]


def _gain(own: Sequence[float], first: Sequence[float]) -> float:
    return float(np.median([a / b for a, b in zip(own, first, strict=True)]))


class _Watched:
    """A policy of whose steps someone else is told too."""

    def __init__(self, policy: Policy, seen: Callable[[BatchView, StepOutcome], None]) -> None:
        self._policy, self._seen = policy, seen
        self.name = policy.name
        self.state, self.load = policy.state, policy.load
        self.delta, self.merge = policy.delta, policy.merge
        self._view: BatchView | None = None

    def decide(self, view: BatchView) -> Plan:
        """Pass on."""
        self._view = view
        return self._policy.decide(view)

    def observe(self, outcome: StepOutcome) -> None:
        """Pass on, and tell."""
        assert self._view is not None, "an outcome follows a decision"
        self._seen(self._view, outcome)
        self._policy.observe(outcome)


class _Timed:
    """A policy that takes its time in the simulator as well."""

    def __init__(self, policy: Policy, backend: SimBackend) -> None:
        self._policy, self._backend = policy, backend
        self.name = policy.name
        self.state, self.load = policy.state, policy.load
        self.delta, self.merge = policy.delta, policy.merge
        self._cold = np.ones(_COLD)

    def decide(self, view: BatchView) -> Plan:
        """Pass on, against the clock."""
        self._cold.sum()
        start_s = time.thread_time()
        plan = self._policy.decide(view)
        self._backend.time_s += time.thread_time() - start_s
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Pass on, against the clock."""
        self._cold.sum()
        start_s = time.thread_time()
        self._policy.observe(outcome)
        self._backend.time_s += time.thread_time() - start_s
