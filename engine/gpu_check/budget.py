"""How long a check may take: a deadline, shares of what is left, and one line where it is short."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """Time until a deadline on `clock` (seconds)."""

    stop_s: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Budget:
        """Return a budget that ends so many seconds from now."""
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Return seconds until the deadline, 0 behind it."""
        return max(self.stop_s - self.clock(), 0.0)

    @property
    def over(self) -> bool:
        """Say whether the deadline has passed."""
        return self.left_s <= 0.0

    def share(self, part: float) -> Budget:
        """Return the budget of a task that may take `part` (0 to 1) of what is left."""
        return Budget.of(part * self.left_s, self.clock)


def shares(weights: list[float]) -> list[float]:
    """Return for tasks that run one after another what part of the time then left each may take.

    Their times are as their weights; what one leaves over goes to all that follow.
    """
    return [weight / sum(weights[at:]) for at, weight in enumerate(weights)]
