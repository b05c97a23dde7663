"""Sim to real: what policies gain as the simulator foretells it, beside what the engine measures.

One run of the engine gives step times, from which a cost model is learned (`cost.StepTime`); a
counterfactual trace gives acceptance. Both the engine and the simulator then play the same waves of
requests, greedily and to the same lengths. Only steps without prompts count: a prompt takes as long
under every policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from parlay.engine.backend import Backend
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams, SpeculationParams
from parlay.engine.step import Engine, EngineConfig
from parlay.policies.baselines.rows import batch_plan
from parlay.policies.cost import StepTime as Learned
from parlay.policies.policy import EngineLimits, Policy, Stateless
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    NONE,
    PROPOSERS,
    BatchView,
    Plan,
    Proposer,
    StepOutcome,
)
from parlay.sim.backend import SimBackend
from parlay.sim.costs import CostModel, StepTime, Work
from parlay.sim.counterfactual import TracedRequest, TraceLuck

MakePolicy = Callable[[EngineLimits], Policy]
_SWEPT = ((NONE, 0), (DRAFT_MODEL, 1), (NGRAM, 4), (DRAFT_MODEL, 2), (NONE, 0), (DRAFT_MODEL, 4),
          (NGRAM, 8), (DRAFT_MODEL, 8))  # fmt: skip
"""What the run that costs are learned from drafts, step after step: (proposer, k) of every row."""
_HEADS = (MEDUSA, 2)


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

    errors: foretold over measured, less 1. tau: Kendall's, of all policies' gains.
    """

    foretold: list[float]
    measured: list[float]
    errors: list[float]
    tau: float


@dataclass(slots=True, frozen=True)
class LearnedCosts:
    """A cost model that says what `cost.StepTime` learned from an engine's steps."""

    learned: Learned
    name: str = "learned"
    bucket_edges: tuple[int, ...] = ()

    def time(self, work: Work) -> StepTime:
        """Return what `work` takes; the host's part is within the verify pass."""
        verify_ms = 0.0
        draft_ms = np.zeros(PROPOSERS, np.float32)
        if work.tokens:
            tokens = np.array([float(work.tokens)])
            verify_ms = float(self.learned.verify_ms(tokens, float(work.kv_tokens))[0])
        a_pass, token_ms, catch_up = self.learned.draft_ms()
        rows = sum(work.draft_rows)
        draft_ms[DRAFT_MODEL] = a_pass * len(work.draft_rows) + float(token_ms[DRAFT_MODEL]) * rows
        draft_ms[DRAFT_MODEL] += catch_up * work.catch_up_tokens
        draft_ms[NGRAM] = float(token_ms[NGRAM]) * work.ngram_rows
        return StepTime(verify_ms, draft_ms, 0.0, work.tokens)


class Sweep(Stateless):
    """Drafts now this, now that, for all rows alike, so that every cost is seen."""

    name = "sweep"

    def __init__(self, limits: EngineLimits) -> None:
        self.choices = [(p, min(k, limits.k_max)) for p, k in _SWEPT if limits.has(p)]
        if limits.has(MEDUSA):
            self.choices.append(_HEADS)

    def decide(self, view: BatchView) -> Plan:
        """Return the next choice for every row."""
        proposer, k = self.choices[view.step_id % len(self.choices)]
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
    backend: Backend, config: EngineConfig, parts: Iterable[Sequence[Ask]]
) -> LearnedCosts:
    """Return the cost model of a run of the engine that drafts now this, now that."""
    learned = Learned()

    def seen(view: BatchView, outcome: StepOutcome) -> None:
        drafts = outcome.proposer == DRAFT_MODEL
        learned.observe(outcome, float(view.draft_kv_lag[drafts].sum()))

    sweep = Player(backend, Sweep, config, seen)
    for part in parts:
        sweep.play(part)
    return LearnedCosts(learned, bucket_edges=backend.limits().bucket_edges)


def simulated(costs: CostModel, recorded: list[TracedRequest], limits: EngineLimits) -> SimBackend:
    """Return the simulator's stand-in for an engine that decodes what was recorded, in order."""
    luck = TraceLuck(recorded, limits.k_max)
    index = {tag: i for i, tag in enumerate(dict.fromkeys(r.task for r in recorded))}
    limits = dataclasses.replace(limits, proposer_mask=limits.proposer_mask & luck.proposer_mask)
    return SimBackend(luck, costs, limits, index, catches_up=True)


def agreement(rows: Sequence[Compared]) -> Agreement:
    """Return how well gains foretold and measured agree.

    A gain is the median over waves of the ratio to the first policy in the same wave and round,
    which stand close in time: the machine may be slower in others.
    """
    foretold = [_gain(row.foretold, rows[0].foretold) for row in rows[1:]]
    measured = [_gain(row.measured, rows[0].measured) for row in rows[1:]]
    errors = [f / m - 1.0 for f, m in zip(foretold, measured, strict=True)]
    return Agreement(
        foretold, measured, errors, float(kendalltau([1, *foretold], [1, *measured]).statistic)
    )


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
