"""What an engine's steps take, and which part of that is the drafter's.

A scheduler sees whole steps only. The drafter's part is told apart because steps differ in how
many passes they asked of it.
"""

from __future__ import annotations

import numpy as np

from parlay.policies.cost import KV_UNIT, TOKENS_UNIT, Line

_PROMPT_MOST = 64
"""A step with more tokens of prompts than this says little about steps without."""


class StepClock:
    """Splits step times, in ms, by a line through those seen so far."""

    def __init__(self) -> None:
        # Against one token verified: 32 tokens, 4096 of KV, a pass of the drafter, a token in it.
        self._line = Line((1.0, 0.5, 0.2, 0.1, 0.003), (0.3, 0.3, 0.2, 0.1, 0.003))

    def split(
        self, ms: float, tokens: int, kv_tokens: int, prompt_tokens: int, passes: int, rows: int
    ) -> tuple[float, float]:
        """Return (verify_ms, draft_ms), whose sum is ms, of a step; learns from it.

        tokens: of the target's pass, prompt_tokens of them; passes: of the drafter over `rows`
        rows, beyond those that it takes anyway.
        """
        x = np.array([1.0, tokens / TOKENS_UNIT, kv_tokens / KV_UNIT, passes, passes * rows])
        if prompt_tokens <= _PROMPT_MOST:
            self._line.add(x, ms)
        if not passes:
            return ms, 0.0
        parts = x * self._line.weights()
        share = float(parts[3:].sum()) / max(float(parts.sum()), 1e-9)
        return ms * (1.0 - share), ms * share
