"""Draft the same for all; verify, within a capacity, what the draft itself thinks likeliest.

Source: TETRIS (Wu et al. 2025, 2502.15197): of all drafted tokens of the batch those with the
largest product of the draft's own probabilities, a prefix of each row, as many as fit.

Kept as the negative control: with the probabilities of the tokens that were drawn as confidences,
as in the source, it is BIASED at temperature above 0. Whether a token is verified then hangs on
which token it is, and the output no longer follows the target's law
(tests/unit/policies/test_bias_controls.py). The engine hands over the largest probability of each
place before its token is drawn, which is unbiased; all else is as in the source.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from parlay.policies.baselines.rows import batch_plan, check_k
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import BatchView, Plan, Proposer, Reason

_MOST_TOKENS = 1 << 16


@dataclass(slots=True, frozen=True)
class TetrisSettings:
    """k, tokens drafted for each request; capacity_tokens, drafted tokens a step may verify."""

    k: int = 4
    capacity_tokens: int = 64

    def __post_init__(self) -> None:
        check_k("tetris", "k", self.k, least=1)
        if not 1 <= self.capacity_tokens <= _MOST_TOKENS:
            raise ValueError(
                f"tetris: capacity_tokens must be between 1 and {_MOST_TOKENS}, "
                f"not {self.capacity_tokens}"
            )


@register("tetris", TetrisSettings)
class Tetris(Stateless):
    """One k and one budget; without survivals or calibration `fit_plan` ranks by confidence."""

    name = "tetris"

    def __init__(self, settings: TetrisSettings, limits: EngineLimits) -> None:
        self.k, self.capacity_tokens = min(settings.k, limits.k_max), settings.capacity_tokens

    def decide(self, view: BatchView) -> Plan:
        """Return the same k for all, and the capacity."""
        plan = batch_plan(view, Proposer.DRAFT_MODEL, self.k, Reason.HEURISTIC)
        return dataclasses.replace(plan, budget_tokens=self.capacity_tokens)
