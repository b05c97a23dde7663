"""The code for GPUs without one: on CPU tensors, and on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from parlay.engine import judge as judge_module
from parlay.engine.judge import judge_on_device
from parlay.engine.proposers import device_draft
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.types import Array


def as_on_device(backend: TorchBackend) -> TorchBackend:
    """Let a backend on a CPU draft and accept as on a GPU."""
    backend.judge = judge_on_device
    for proposer in (backend.draft, backend.medusa):
        if proposer is not None:
            proposer.on_device = True
    return backend


class BlindReading:
    """Stands for `Reading` where tensors have no data: all of them are told to be 0."""

    made = 0

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def arrays(self) -> list[Array]:
        BlindReading.made += 1
        kinds: dict[bool, Any] = {True: np.float64, False: np.int64}
        return [np.zeros(t.shape, kinds[t.dtype.is_floating_point]) for t in self.tensors]


def read_blindly(monkeypatch: pytest.MonkeyPatch) -> type[BlindReading]:
    BlindReading.made = 0
    for module in (judge_module, device_draft):
        monkeypatch.setattr(module, "Reading", BlindReading)
    return BlindReading
