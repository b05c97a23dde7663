"""Passes of `llama.c`: what one reads and writes, and one that runs beside Python."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parlay.engine.landed import Landed
from parlay.policies.types import Array

_POINTER = ctypes.c_void_p


class Pass(ctypes.Structure):
    """What one pass reads and writes; `llama.c` says what each field is."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        *(
            (name, _POINTER)
            for name in ("base", "mask", "table", "tap", "x", "normed", "tapped", "scratch")
        ),
    ]


class Flight(ctypes.Structure):
    """A pass in a thread of its own; `llama.c` says what each field is."""

    _fields_ = [
        ("model", _POINTER),
        ("reads", _POINTER),
        ("places", ctypes.c_int64),
        ("head_rows", ctypes.c_int64),
        *((name, _POINTER) for name in ("place", "head", "logits")),
        ("ms", ctypes.c_double),
        ("thread", ctypes.c_ulong),
    ]


@dataclass(slots=True)
class Laid:
    """A pass as the kernels take it, what it writes, and what must live until it has."""

    reads: Pass
    normed: Tensor
    tapped: Tensor
    last_tapped: bool
    held: tuple[Any, ...]

    def states(self) -> Tensor:
        """Return the tapped states, [tokens, taps * hidden]."""
        tapped = self.tapped
        if self.last_tapped:
            tapped = torch.cat((tapped, self.normed[:, None]), 1)
        return tapped.flatten(1)


class NativeFlight:
    """A pass in another thread, which begins at once; until it lands nothing else runs the model.

    places i64 [n], rows of the pass, ascending; logits [n, head rows] of theirs. Raises OSError
    where there is no thread for it.
    """

    def __init__(
        self, kernels: ctypes.CDLL, flight: Flight, laid: Laid, places: Array, logits: Tensor
    ) -> None:
        self._kernels, self._flight, self._laid = kernels, flight, laid
        self._places, self._logits = places, logits
        error = kernels.parlay_launch(ctypes.byref(flight))
        self._flies = not error
        if error:
            raise OSError(error, f"no thread for a pass: {os.strerror(error)}")

    def land(self) -> Landed:
        """Wait for it."""
        self._wait()
        return Landed(self._laid.normed, self._laid.states(), self._logits, self._flight.ms)

    def __del__(self) -> None:
        # What it writes to goes with this object.
        self._wait()

    def _wait(self) -> None:
        if self._flies:
            self._flies = False
            self._kernels.parlay_land(ctypes.byref(self._flight))
