"""The guard's terms: how sure it wants to be and what that may cost, and how it says it stands."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.policies.switchback import FIRST_GAP_STEPS

TRANSITION_STEPS = 2
"""First steps of a block that do not count: the draft model catches up, plans arrive late."""


@dataclass(slots=True, frozen=True)
class GuardSettings:
    """How sure, how long, how dear.

    alpha: chance that either bound of the gain is ever wrong while the gain stays. block_steps:
    steps measured in each half of a pair. last_gap_steps: mean of the longest interval between
    probes, which sets the delay. loss_share, probe_share: shares of the time that the estimated
    loss, and the pairs, may cost. seed: of the order of blocks and the gaps between pairs.
    """

    alpha: float = 0.05
    block_steps: int = 8
    last_gap_steps: int = 192
    loss_share: float = 0.005
    probe_share: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 0.5:
            raise ValueError(f"guard: alpha must be between 0 and .5, not {self.alpha}")
        if not 1 <= self.block_steps <= 1024:
            raise ValueError(f"guard: block_steps must be 1 to 1024, not {self.block_steps}")
        if self.last_gap_steps < FIRST_GAP_STEPS:
            raise ValueError(
                f"guard: last_gap_steps must be {FIRST_GAP_STEPS} or more, not"
                f" {self.last_gap_steps}"
            )
        for name in ("loss_share", "probe_share"):
            if not 0.0 < getattr(self, name) <= 0.5:
                raise ValueError(f"guard: {name} must be above 0 and at most .5")
        if self.seed < 0:
            raise ValueError(f"guard: seed must be 0 or more, not {self.seed}")

    @property
    def delay_steps(self) -> int:
        """Steps within which a policy that gains a tenth again is back on, 95 times in 100.

        So with a pair's noise near .1; a single noisy request, or probes dear enough to wait for
        their share of the time, take up to twice as long.
        """
        pair = 2 * (self.block_steps + TRANSITION_STEPS)
        return 4 * (self.last_gap_steps + pair)


@dataclass(slots=True, frozen=True)
class GuardReport:
    """Where the guard stands.

    gain: goodput with the policy over goodput without, since the last change, nan before the first
    pair; its bounds, 0 and inf where there are none yet. loss_s: estimated loss against no
    speculation beyond the allowed share, never below 0. probing_s: what pairs have cost, and its
    share of elapsed_s. switches: times turned off or on; probes: pairs measured; resets: changes
    found.
    """

    on: bool
    gain: float
    lower: float
    upper: float
    loss_s: float
    elapsed_s: float
    probing_s: float
    probing_share: float
    switches: int
    probes: int
    resets: int
