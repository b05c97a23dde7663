"""What came of asking the sidecar."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

SAMPLES = 8192


@dataclass(slots=True)
class RemoteStats:
    """What came of asking the sidecar, in steps unless said; last_error is empty while all is well.

    late_steps followed a plan older than the report before the newest. dropped_reports were thrown
    away because the sidecar was behind or gone. reconnects: streams welcomed after the first.
    endings: streams by the way they ended: silent (no answer in time), refused (an answer that is
    none), draining, ended (in good order), credentials (files that cannot be read), failed (nobody
    thought of it), else gRPC's status in lower case. engine_thread_us: what each of the newest
    steps cost the engine's thread, without the fallback's own work.
    """

    plans_remote: int = 0
    plans_local: int = 0
    late_steps: int = 0
    dropped_reports: int = 0
    reconnects: int = 0
    last_error: str = ""
    endings: Counter[str] = field(default_factory=Counter)
    engine_thread_us: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    @property
    def fresh_share(self) -> float:
        """Return the share of steps that followed a plan of the newest report or the one before."""
        steps = self.plans_remote + self.plans_local
        return (self.plans_remote - self.late_steps) / steps if steps else 0.0
