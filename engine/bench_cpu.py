"""Where a machine's CPU time went, as Linux tells: to a process, or the host's other guests."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

_STEAL = 7
"""Place of the time that the host gave to others, in /proc/stat."""


@dataclass(slots=True)
class CpuUse:
    """CPU time from the first `note` to the last; pid: whose; nan where the system does not tell.

    Notes are seconds of the clock, of the process, stolen, and of all cores.
    """

    pid: int
    notes: list[tuple[float, float, float, float]] = field(default_factory=list)

    def note(self) -> None:
        """Note where all stands."""
        own_s = _process_s(self.pid)
        stolen_s, all_s = _machine_s()
        self.notes.append((time.monotonic(), own_s, stolen_s, all_s))

    @property
    def cores(self) -> float:
        """Return how many cores the process kept busy."""
        return self._share(1, 0)

    @property
    def stolen_share(self) -> float:
        """Return the share of the machine's time that the host gave to others."""
        return self._share(2, 3)

    def _share(self, of: int, to: int) -> float:
        if len(self.notes) < 2:
            return nan
        first, last = self.notes[0], self.notes[-1]
        passed = last[to] - first[to]
        return (last[of] - first[of]) / passed if passed > 0.0 else nan


def _process_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _machine_s() -> tuple[float, float]:
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return nan, nan
    # Time of guests is counted among the first two already.
    ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9]]
    return ticks[_STEAL], sum(ticks)
