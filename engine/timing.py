"""Moments of a device's work, told apart without making the host wait for them."""

from __future__ import annotations

import time

import torch


class Mark:
    """A moment: when a device is done with all that it was given up to here, on a CPU now."""

    def __init__(self, device: torch.device) -> None:
        self.at_s = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has come here."""
        if self.event is not None:
            self.event.synchronize()

    def ms_until(self, end: Mark) -> float:
        """Return how long a device took from here to `end`, a mark on it that has been reached."""
        if self.event is None or end.event is None:
            return 1e3 * (end.at_s - self.at_s)
        return float(self.event.elapsed_time(end.event))
