"""What came of an episode: tokens, time and waits, added up a step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from parlay.policies.types import PROPOSERS, Array, StepOutcome
from parlay.sim.noted import NotedPlanner

BUCKETS = 200


@dataclass(slots=True)
class Episode:
    """What a policy made of a scenario, warm-up left out.

    tokens emitted, step_s the time of the steps, of it draft_s for drafting and of that catch_up_s
    for KV that the draft model owed; tries: request-steps planned to learn something. By request
    that ended: ttft_s, tpot_ms (nan: of one token). By stretch of steps [BUCKETS]: tokens, time, of
    it for prompts, tokens verified (k), and rows by proposer [BUCKETS, PROPOSERS].
    """

    tokens: int = 0
    step_s: float = 0.0
    steps: int = 0
    draft_s: float = 0.0
    catch_up_s: float = 0.0
    tries: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    bucket_tokens: Array = field(default_factory=lambda: np.zeros(BUCKETS))
    bucket_s: Array = field(default_factory=lambda: np.zeros(BUCKETS))
    bucket_prompts_s: Array = field(default_factory=lambda: np.zeros(BUCKETS))
    bucket_k: Array = field(default_factory=lambda: np.zeros(BUCKETS))
    bucket_rows: Array = field(default_factory=lambda: np.zeros((BUCKETS, PROPOSERS)))

    @property
    def goodput(self) -> float:
        """Return emitted tokens per second of step time."""
        return self.tokens / self.step_s if self.step_s else 0.0

    def add(self, other: Episode) -> None:
        """Add another start of the same scenario."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class Tally:
    """Adds the steps of one start to an episode, and says when it is over.

    step: how many there were; requests: how many came. A closed loop is over after `steps`
    measured ones, an open one once it has served `served` requests.
    """

    def __init__(self, into: Episode, warm_up_steps: int, steps: int, served: int) -> None:
        self.into, self.warm_up, self.steps, self.served = into, warm_up_steps, steps, served
        self.step = 0
        self._ended = 0
        self.requests = 0
        self._came: dict[int, tuple[float, int]] = {}
        self._first_s: dict[int, float] = {}
        self._silent: set[int] = set()

    def came(self, request_id: int, arrived_s: float, output_tokens: int) -> None:
        """Note a request that will put out so many tokens."""
        self.requests += 1
        self._came[request_id] = arrived_s, output_tokens
        self._silent.add(request_id)

    def note(self, outcome: StepOutcome, now_s: float, planner: NotedPlanner) -> bool:
        """Add a step that `planner` planned and that ended now; return whether it was the last."""
        measured = self.step >= self.warm_up
        if measured:
            self._measure(outcome, planner)
        emits = outcome.emitted > 0
        if self._silent:
            for key in outcome.request_id[emits].tolist():
                if key in self._silent:
                    self._silent.remove(key)
                    self._first_s[key] = now_s
        for key in outcome.request_id[outcome.truncated_by > 0].tolist():
            self._end(key, now_s, measured)
        self.step += 1
        if self.served:
            return self._ended >= self.served
        return self.step >= self.warm_up + self.steps

    def _measure(self, outcome: StepOutcome, planner: NotedPlanner) -> None:
        into = self.into
        gone = self._ended / self.served if self.served else (self.step - self.warm_up) / self.steps
        bucket = min(int(gone * BUCKETS), BUCKETS - 1)
        emitted, step_s = int(outcome.emitted.sum()), 1e-3 * outcome.step_ms
        into.tokens += emitted
        into.step_s += step_s
        into.steps += 1
        into.draft_s += 1e-3 * float(outcome.draft_ms.sum())
        into.catch_up_s += planner.catch_up_s
        into.tries += planner.tries
        into.bucket_tokens[bucket] += emitted
        into.bucket_s[bucket] += step_s
        into.bucket_prompts_s[bucket] += planner.prompts_s
        into.bucket_k[bucket] += int(outcome.verified_k.sum())
        into.bucket_rows[bucket] += np.bincount(outcome.proposer, minlength=PROPOSERS)

    def _end(self, key: int, now_s: float, measured: bool) -> None:
        (arrived_s, tokens), first_s = self._came.pop(key), self._first_s.pop(key)
        self._ended += 1
        if measured:
            self.into.ttft_s.append(first_s - arrived_s)
            took_ms = 1e3 * (now_s - first_s)
            self.into.tpot_ms.append(took_ms / (tokens - 1) if tokens > 1 else float("nan"))
