"""How many tokens a batch of SGLang's drafts: one number for all of it. Free of SGLang.

SGLang's hook tells of no requests and no times: only how many are in a batch, and what held of
their drafts. Each rank of a tensor-parallel engine asks its own copy of this, and all must answer
alike: with a clock it is for one rank alone; without one, steps take what `StepPrice` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parlay.engine.plugins.adapter import Adapter, Decision, StepResult, Tracked, view_of
from parlay.engine.plugins.fitting import draft_all
from parlay.engine.plugins.step_clock import StepClock
from parlay.policies.acceptance import FIRST_TOKENS
from parlay.policies.types import DRAFT_MODEL, PROPOSERS, Array

_UNDER_WAY = 3
"""Most steps that are decided on before the first of them is told of; SGLang overlaps two."""
_IDLE = 4.0
"""A step that takes so many times the last ones' time had prompts or idleness in it."""


@dataclass(slots=True, frozen=True)
class StepPrice:
    """What a step takes, in any one unit: itself, each token it verifies, each pass that drafts."""

    fixed: float = 10.0
    token: float = 0.03
    draft_pass: float = 0.6

    def __post_init__(self) -> None:
        prices = (self.fixed, self.token, self.draft_pass)
        if not all(0.0 <= p < np.inf for p in prices) or self.fixed <= 0.0:
            raise ValueError(f"a step's price must be three numbers above 0, not {prices}")


@dataclass(slots=True)
class _Decided:
    decision: Decision
    k: int


class BatchSteps:
    """Decides for whole batches. `steps` is asked before each, `verified` is told after it.

    clock: seconds; None where several ranks must decide alike, who then believe `price`.
    """

    def __init__(
        self,
        adapter: Adapter,
        clock: Callable[[], float] | None = None,
        price: StepPrice = StepPrice(),
    ) -> None:
        self.adapter, self.clock, self.price = adapter, clock, price
        self._times = StepClock()
        self._rows: list[Tracked] = []
        self._under_way: deque[_Decided] = deque(maxlen=_UNDER_WAY)
        self._usual_ms = 0.0
        self._last: tuple[float, int] | None = None

    def steps(self, batch_size: int, lengths: Sequence[int]) -> int:
        """Return the k of the coming step, one of `lengths`, in rising order."""
        while len(self._rows) < batch_size:
            row = self.adapter.add()
            row.output_tokens = FIRST_TOKENS  # nobody says who is new
            self._rows.append(row)
        rows = self._rows[:batch_size]
        for row in rows:
            row.room = lengths[-1]
        decision = self.adapter.decide(view_of(rows, self.adapter.limits))
        k = nearest(decision.fit.k, lengths)
        _set_all(decision, k)
        self._under_way.append(_Decided(decision, k))
        return k

    def verified(
        self, accepted: Sequence[int], batch_size: int, drafted: int | None = None
    ) -> None:
        """Hear of the oldest step that was not told of yet, and of what was before it.

        accepted: of each request's drafts, as they are in the batch; drafted: tokens each had,
        where SGLang says it.
        """
        decided = self._decided_for(batch_size)
        if decided is None or not accepted:
            return
        rows, k = batch_size, decided.k if drafted is None else drafted
        held = np.zeros(rows, np.int32)
        held[: len(accepted)] = accepted[:rows]
        here = np.arange(rows) < len(accepted)
        np.minimum(held, k, out=held)
        emitted = np.where(here, held + 1, 0)
        if drafted is not None and drafted != decided.k:
            _set_all(decided.decision, drafted)
        for row, tokens in zip(self._rows, emitted.tolist(), strict=False):
            row.output_tokens += tokens
        verify_ms, draft_ms, step_ms = self._took(rows, k)
        if step_ms > 0.0:
            self.adapter.observe(
                decided.decision,
                StepResult(
                    drafted=np.where(here, k, 0),
                    accepted=held,
                    emitted=emitted,
                    draft_ms=_of_drafter(draft_ms),
                    draft_depth=k,
                    verify_ms=verify_ms,
                    step_ms=step_ms,
                    padded_tokens=rows * (k + 1),
                ),
            )

    def close(self) -> None:
        """Let go of a sidecar."""
        self.adapter.close()

    def _decided_for(self, batch_size: int) -> _Decided | None:
        while self._under_way:
            decided = self._under_way.popleft()
            if len(decided.decision.view) == batch_size:
                return decided
        return None

    def _took(self, rows: int, k: int) -> tuple[float, float, float]:
        """Return verify_ms, draft_ms and step_ms; the last is 0 where nobody knows."""
        passes, tokens = max(k - 1, 0), rows * (k + 1)
        if self.clock is None:
            verify_ms = self.price.fixed + self.price.token * tokens
            draft_ms = self.price.draft_pass * passes
            return verify_ms, draft_ms, verify_ms + draft_ms
        end_s, last = self.clock(), self._last
        self._last = end_s, rows
        # Where a batch has changed, a prompt was read in between.
        if last is None or last[1] != rows:
            return 0.0, 0.0, 0.0
        step_ms = 1e3 * (end_s - last[0])
        if step_ms > _IDLE * self._usual_ms > 0.0:
            self._usual_ms *= 1.1  # should it stay so slow, it is no exception
            return 0.0, 0.0, 0.0
        self._usual_ms += 0.1 * (step_ms - self._usual_ms) if self._usual_ms else step_ms
        verify_ms, draft_ms = self._times.split(step_ms, tokens, 0, 0, passes, rows)
        return verify_ms, draft_ms, step_ms


def nearest(k: Array, lengths: Sequence[int]) -> int:
    """Return the length nearest to the mean of k i32 [rows]; of two as near, the smaller."""
    mean = float(k.mean()) if len(k) else 0.0
    return min(lengths, key=lambda length: (abs(length - mean), length))


def _set_all(decision: Decision, k: int) -> None:
    draft_all(decision.fit, np.full(len(decision.view), k, np.int32), DRAFT_MODEL)


def _of_drafter(ms: float) -> Array:
    spent = np.zeros(PROPOSERS, np.float32)
    spent[DRAFT_MODEL] = ms
    return spent
