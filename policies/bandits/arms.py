"""The arms that bandits choose among, and which arm a finished step had pulled."""

from __future__ import annotations

from collections import deque

import numpy as np

from parlay.policies.baselines.rows import check_k, drafter
from parlay.policies.types import Array, PlanSource, Proposer, StepOutcome

_PENDING_STEPS = 64
DEFAULT_ARMS = ("none:0", "ngram:3", "draft_model:1", "draft_model:3")

Arm = tuple[Proposer, int]


def parse_arms(policy: str, arms: tuple[str, ...]) -> tuple[Arm, ...]:
    """Read arms written as proposer:k; raises ValueError for anything else, or fewer than two."""
    found = []
    for text in arms:
        name, _, k = text.partition(":")
        if not k.isdigit():
            raise ValueError(f"{policy}: arm '{text}' should be proposer:k, such as ngram:3")
        proposer = Proposer.NONE if name == "none" else drafter(policy, name)
        check_k(policy, f"k of arm '{text}'", int(k), least=int(proposer is not Proposer.NONE))
        found.append((proposer, int(k)))
    if len(set(found)) != len(found) or len(found) < 2:
        raise ValueError(f"{policy}: arms must be two or more, all different")
    return tuple(found)


def check_seed(policy: str, seed: int) -> None:
    """Raise ValueError where a seed is below 0."""
    if seed < 0:
        raise ValueError(f"{policy}: seed must be 0 or more, not {seed}")


class Pulls:
    """Remembers which arm each of the newest steps pulled, and how likely that was.

    Outcomes come some steps later.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[int, int, float]] = deque(maxlen=_PENDING_STEPS)

    def add(self, step_id: int, arm: int, chance: float = 1.0) -> None:
        """Note that the plan of step_id pulls an arm, as was to happen with that chance."""
        self._newest.append((step_id, arm, chance))

    def reward(self, outcome: StepOutcome) -> tuple[int, float, float] | None:
        """Return a step's arm, its chance, and accepted + 1, the mean over rows that followed it.

        None where none of them decoded, or the plan was another's.
        """
        at = (outcome.plan_source != PlanSource.DEFAULT) & (outcome.emitted > 0)
        if not at.any():
            return None
        plans, rows = np.unique(outcome.plan_step_id[at], return_counts=True)
        plan = int(plans[rows.argmax()])
        pulled = [(arm, p) for step_id, arm, p in reversed(self._newest) if step_id == plan]
        return (*pulled[0], float(outcome.accepted[at].mean()) + 1.0) if pulled else None


def state_of(policy: str, arms: int, state: dict[str, Array], own: dict[str, Array]) -> None:
    """Raise ValueError where a state is not one of this policy with so many arms."""
    if set(state) != set(own) or any(np.shape(state[k]) != np.shape(own[k]) for k in own):
        raise ValueError(f"{policy}: the state is not one of this policy with {arms} arms")
