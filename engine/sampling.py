"""Drawing tokens with counter-based randomness: keyed by (seed, request, output position, purpose).

No stream is shared, so what a request draws does not depend on who else runs, nor on how many
tokens a step verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from parlay.engine.request import Request, SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    COUPLED = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def mix64(x: int) -> int:
    """Return SplitMix64's finaliser of a 64-bit integer (Steele, Lea, Flood 2014)."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def request_key(request: Request, engine_seed: int) -> int:
    """Return a request's key: its seed's where it has one, else the engine's and its id's."""
    seed = request.sampling.seed
    return (
        mix64(engine_seed + _GOLDEN * request.request_id)
        if seed is None
        else mix64(mix64(seed) + 1)
    )


def draw_key(request_key: int, position: int, purpose: Purpose) -> int:
    """Return the key of one draw: `position` is the output position of the token it decides."""
    return mix64(mix64(request_key + _GOLDEN * position) + int(purpose))


def uniform(key: int) -> float:
    """Return the key's own uniform number in (0, 1), of 52 bits: a 53rd would round up to 1."""
    return ((mix64(key) >> 12) + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def exponentials(keys: Sequence[int], ids: Tensor) -> Tensor:
    """Return float64 [keys, ids]: an exponential draw for each key and token id, always the same.

    A race of exponentials, argmin E_i / p_i, draws i with probability p_i: -log E_i is Gumbel
    noise.
    """
    key = torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=ids.device)
    x = key[:, None] + (ids + 1) * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    return -torch.log((_shift(x, 12).double() + 0.5) * 2.0**-52)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return float64 [rows, vocab]: each row's law after temperature (> 0), top-k and top-p."""
    scale = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
    # Differences from the largest: a temperature near 0 makes them -inf, never inf - inf.
    exact = logits.double()
    scaled = (exact - exact.amax(-1, keepdim=True)) / scale[:, None]
    if any(p.top_k or p.top_p < 1.0 for p in params):
        scaled = _filtered(scaled, params)
    return torch.softmax(scaled, -1)


def _filtered(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Hide what top-k and top-p exclude; ties at the edge stay in by token id."""
    vocab, device = scaled.shape[-1], scaled.device
    order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=device)[:, None]
    # Off is inf: a row beside one with top-p must not lose its tail where sums round up to 1.
    mass = [p.top_p if p.top_p < 1.0 else float("inf") for p in params]
    top_p = torch.tensor(mass, dtype=torch.float64, device=device)[:, None]
    beyond = torch.arange(vocab, device=device) >= top_k
    law = torch.softmax(order.values.masked_fill(beyond, float("-inf")), -1)
    # A token stays while the mass before it is below top_p: the first always does.
    beyond |= law.cumsum(-1) - law >= top_p
    return scaled.masked_fill(beyond.gather(1, order.indices.argsort(-1)), float("-inf"))


def race(law: Tensor, keys: Sequence[int], ids: Tensor) -> Tensor:
    """Draw one index of `law` [rows, n] per row, by the noise of token ids [n]; i64 [rows]."""
    return (law / exponentials(keys, ids)).argmax(-1)


_CHUNK = 128


def first_choices(logits: Tensor) -> Tensor:
    """Return i64 [rows]: the first of the largest logits [rows, vocab] of each row."""
    rows, vocab = logits.shape
    if logits.dtype is not torch.bfloat16 or logits.device.type != "cpu" or vocab % _CHUNK:
        return logits.float().argmax(-1)
    # Bits of floats above 0 rise as the floats do, and those of the others are negative as i16.
    # Maxima of i16 are vectorised: a tenth of float32's argmax, which has a fifth of bf16's.
    bits = logits.contiguous().view(torch.int16).view(rows, -1, _CHUNK)
    peak, chunk = bits.amax(-1).to(torch.int32).max(-1)
    if int(peak.min()) <= 0:
        return logits.float().argmax(-1)
    inside = bits[torch.arange(rows), chunk].to(torch.int32).argmax(-1)
    return chunk * _CHUNK + inside
