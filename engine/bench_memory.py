"""How much memory a process had at most, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

_PEAK = "VmHWM:"


def reset_peak(pid: int) -> None:
    """Begin anew with the peak of process `pid`, where the system can."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # then the peak is that of its whole life


def peak_mb(pid: int) -> float | None:
    """Return the most resident MB (10^6 bytes) since `reset_peak`; None where nobody counts."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(_PEAK):
            return int(line.split()[1]) * 1024 / 1e6
    return None
