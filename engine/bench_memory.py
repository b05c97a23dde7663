"""How much memory a process had at most, as Linux tells it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_PEAK = "VmHWM:"
_NOW = "VmRSS:"
# Linux counts resident pages per core and adds them up late.
_LATE_MB = 8.0


def reset_peak(pid: int) -> bool:
    """Begin anew with the peak of process `pid`; False where it stays that of its whole life."""
    # Some containers refuse it, others take it and do nothing: the figures tell.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    now, peak = _status_mb(pid, _NOW), peak_mb(pid)
    return now is not None and peak is not None and peak - now < _LATE_MB


def peak_mb(pid: int) -> float | None:
    """Return the most resident MB (10^6 bytes) since `reset_peak`; None where nobody counts."""
    return _status_mb(pid, _PEAK)


def resident_mb(pid: int) -> float | None:
    """Return the resident MB (10^6 bytes) of now; None where nobody counts."""
    return _status_mb(pid, _NOW)


def _status_mb(pid: int, name: str) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1]) * 1024 / 1e6
    return None
