"""The least time a pass can take: the bytes it must read, at the rate this device copies at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from parlay.engine.gpu_check.shapes import free_bytes, kv_numbers, read_parameters
from parlay.engine.model_config import ModelConfig

_COPY_BYTES = {"cuda": 1 << 32, "cpu": 1 << 26}
_MATMUL = {"cuda": 8192, "cpu": 256}
_REPEATS = 10


def sync(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(device: torch.device, run: Callable[[], object], repeats: int) -> float:
    """Return the median time of `run` over repeats, each from an idle device to an idle device."""
    found = []
    for _ in range(repeats):
        sync(device)
        start_s = time.perf_counter()
        run()
        sync(device)
        found.append(1e3 * (time.perf_counter() - start_s))
    return median(found)


@dataclass(slots=True, frozen=True)
class Rates:
    """What a device does at best: bytes a second read and written by a copy, and operations a
    second of a large matrix product in the models' dtype (a multiply and an add are two).
    """  # noqa: D205

    bytes_per_s: float
    flops: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Copy a buffer far larger than the caches, and multiply two large matrices."""
    size = min(_COPY_BYTES[device.type], free_bytes(device) // 4)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy_ms = timed_ms(device, lambda: target.copy_(source), _REPEATS)
    n = _MATMUL[device.type]
    a = torch.randn(n, n, device=device, dtype=dtype)
    torch.mm(a, a)
    mm_ms = timed_ms(device, lambda: torch.mm(a, a), _REPEATS)
    return Rates(2e3 * size / copy_ms, 2e3 * n**3 / mm_ms)


@dataclass(slots=True, frozen=True)
class Floor:
    """The floors of a model's passes on a device.

    weight_bytes, weights: what every pass reads of them, and how many numbers that is; kv_bytes: of
    one token.
    """

    weight_bytes: int
    weights: int
    kv_bytes: int
    rates: Rates

    def bytes_ms(self, batch: int, width: int, context: int) -> float:
        """Return the time to read all weights, and the keys and values of `batch` requests."""
        kv = batch * (context + width) * self.kv_bytes
        return 1e3 * (self.weight_bytes + kv) / self.rates.bytes_per_s

    def flops_ms(self, batch: int, width: int) -> float:
        """Return the time of the weights' arithmetic alone."""
        return 2e3 * self.weights * batch * width / self.rates.flops

    def reads(self, batch: int, width: int, context: int) -> bool:
        """Say whether a pass is bound by what it reads rather than by its arithmetic."""
        return self.bytes_ms(batch, width, context) >= self.flops_ms(batch, width)


def floor_of(config: ModelConfig, dtype: torch.dtype, rates: Rates) -> Floor:
    """Return a model's floors where weights and cache are of one dtype."""
    weights = read_parameters(config)
    size = dtype.itemsize
    return Floor(weights * size, weights, kv_numbers(config) * size, rates)
