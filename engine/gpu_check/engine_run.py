"""The whole engine on random weights, decoding steadily: modes take turns on one backend."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from parlay.engine.gpu_check.budget import Budget
from parlay.engine.gpu_check.passes import BLOCK_TOKENS
from parlay.engine.gpu_check.synthetic import MIX, SyntheticBackend
from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.sparing import SparingPlanner
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.virtual import Hazards
from parlay.policies.policy import make_policy
from parlay.policies.types import StepOutcome

SPARE_TOKENS = 1024
"""A request may grow so much in a turn; then its turn is over."""
_LARGEST_STEP = 32
_LEAST_STEPS = 4
"""A turn measures so many, even where time is short."""
_WARM_UP = 0.1
"""Of a turn: its first steps are not counted."""
_SEED = 20


@dataclass(slots=True, frozen=True)
class Mode:
    """A name for tables, the policy behind it, and whether it decides while the target runs."""

    name: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    overlap: bool = False


NONE = "none"
STATICS = tuple(
    Mode(f"draft-{k}", "fixed", {"proposer": "draft_model", "k": k}) for k in (1, 3, 5, 7)
)
ADAPTIVES = (Mode("goodput", "goodput"), Mode("pilot", "pilot"))
MODES = (Mode(NONE, "none"), *STATICS, *ADAPTIVES)


@dataclass(slots=True)
class Tally:
    """What a mode did in its measured steps: seconds, emitted tokens, and times in ms a step."""

    seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    by_turn: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    drafted: int = 0

    def add(self, outcome: StepOutcome, seconds: float) -> None:
        """Count a step that took so long from the end of the one before."""
        self.seconds += seconds
        self.tokens += int(outcome.emitted.sum())
        self.rows += len(outcome.emitted)
        self.drafted += int(outcome.drafted_k.sum())
        self.step_ms.append(float(outcome.step_ms))
        self.verify_ms.append(float(outcome.verify_ms))
        self.draft_ms.append(float(outcome.draft_ms.sum()))


def steady_config(batch: int, context: int, blocks: int) -> EngineConfig:
    """Return the config for `batch` requests that all decode, their prompts read in one step.

    The draft reads whole texts, as a checkpoint's does, and catches up within a step or two.
    """
    longest = context + 2 * SPARE_TOKENS
    return EngineConfig(
        max_running=batch, token_budget=batch * max(context, _LARGEST_STEP),
        block_tokens=BLOCK_TOKENS, target_blocks=blocks, draft_blocks=blocks,
        context_tokens=longest, draft_window_tokens=longest, draft_catch_up_tokens=4096,
        prefix_cache=False,
    )  # fmt: skip


class Lane:
    """A mode's engine; its policy learns on from turn to turn."""

    def __init__(self, mode: Mode, backend: SyntheticBackend, batch: int, context: int) -> None:
        self.mode, self.batch, self.context, self.tally = mode, batch, context, Tally()
        policy = make_policy(mode.policy, mode.settings, backend.limits())
        self.planner: Planner = SparingPlanner(policy)
        self.idle: Planner = LocalPlanner(make_policy("none", {}, backend.limits()))
        config = replace(backend.inner.config, overlap=mode.overlap)
        self.engine = Engine(backend, self.idle, config)
        self.vocab, self.device = backend.vocab, backend.inner.target.device

    def turn(self, seconds: float) -> None:
        """Decode for so long in all; small batches do so several times, until every task had its
        time.
        """  # noqa: D205
        parts = max(len(MIX) // self.batch, 1)
        seen, before = self.tally.seconds, self.tally.tokens
        for part in range(parts):
            self._part(part, seconds / parts, -(-_LEAST_STEPS // parts))
        if (measured_s := self.tally.seconds - seen) > 0.0:
            self.tally.by_turn.append((self.tally.tokens - before) / measured_s)

    def _part(self, part: int, seconds: float, least: int) -> None:
        """Decode for so long and so many steps, or until a request has grown by SPARE_TOKENS."""
        engine, tally, requests = self.engine, self.tally, self.begin(part)
        start_s = time.perf_counter()
        warm_s, begin_s, steps = start_s + _WARM_UP * seconds, 0.0, 0
        while has_room(requests):
            if time.perf_counter() >= start_s + seconds and steps >= least:
                break
            outcome = engine.step()
            assert outcome is not None
            now_s = time.perf_counter()
            if begin_s:
                tally.add(outcome, now_s - begin_s)
                begin_s, steps = now_s, steps + 1
            elif now_s >= warm_s:
                begin_s = now_s
        self.end(requests)

    def begin(self, part: int = 0) -> list[Request]:
        """Add a batch of requests and read their prompts; from here on all steps only decode."""
        requests = [self._added(part * self.batch + row) for row in range(self.batch)]
        self.engine.planner = self.idle
        while any(request.pending != 1 for request in requests):
            assert self.engine.step() is not None
        self.engine.planner = self.planner
        return requests

    def end(self, requests: Sequence[Request]) -> None:
        """Take a batch out again."""
        for request in requests:
            self.engine.abort(request)

    def _added(self, number: int) -> Request:
        """Queue a request whose prompt is like no other's."""
        rng = np.random.default_rng([_SEED, number])
        prompt = rng.integers(0, self.vocab, self.context).tolist()
        tags = list(MIX)
        sampling = SamplingParams(max_tokens=self.context + 2 * SPARE_TOKENS, ignore_eos=True)
        return self.engine.add(prompt, sampling, SpeculationParams(task=tags[number % len(tags)]))


def has_room(requests: Sequence[Request]) -> bool:
    """Say whether every request may grow by another step."""
    return max(r.output_tokens for r in requests) < SPARE_TOKENS - _LARGEST_STEP


def blocks_for(batch: int, context: int) -> int:
    """Return the cache blocks that `batch` requests need in a turn."""
    return batch * (-(-(context + SPARE_TOKENS) // BLOCK_TOKENS) + 1)


def run_batch(
    backend: TorchBackend,
    batch: int,
    context: int,
    budget: Budget,
    modes: Sequence[Mode] = MODES,
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """Return a row for each mode; within a round each has a turn, all of them equally long.

    The first round is not counted: graphs are recorded and policies learn what there is to learn.
    """
    synthetic = SyntheticBackend(backend, Hazards(MIX, seed=_SEED))
    lanes = [Lane(mode, synthetic, batch, context) for mode in modes]
    beside_s = budget.left_s / (2 * rounds * len(lanes))
    for number in range(rounds):
        start_s = budget.left_s
        each_s = max(start_s / ((rounds - number) * len(lanes)) - beside_s, 0.0)
        for place in range(len(lanes)):
            lanes[(place + number) % len(lanes)].turn(each_s)
        # Adding requests, and taking them out again, is a part of a turn that its time is not.
        beside_s = max((start_s - budget.left_s) / len(lanes) - each_s, 0.0)
        if number == 0:
            for lane in lanes:
                lane.tally = Tally()
    return [row_of(lane) for lane in lanes]


def row_of(lane: Lane) -> dict[str, Any]:
    """Return a mode's figures at one batch; speeds are nan where its turns were too short."""
    tally = lane.tally
    steps, nan = len(tally.step_ms), float("nan")
    host = [
        s - v - d for s, v, d in zip(tally.step_ms, tally.verify_ms, tally.draft_ms, strict=True)
    ]
    return {
        "mode": lane.mode.name,
        "batch": lane.batch,
        "context_tokens": lane.context,
        "tokens_per_s": tally.tokens / tally.seconds if steps else nan,
        "tokens_per_s_by_turn": tally.by_turn,
        "emitted_per_step": tally.tokens / tally.rows if steps else nan,
        "drafted_per_step": tally.drafted / tally.rows if steps else nan,
        "steps": steps,
        "step_ms": median(tally.step_ms) if steps else nan,
        "verify_ms": median(tally.verify_ms) if steps else nan,
        "draft_ms": median(tally.draft_ms) if steps else nan,
        "host_ms": median(host) if steps else nan,
    }
