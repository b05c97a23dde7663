"""Drawing tokens with counter-based randomness: keyed by (seed, request, output position, purpose).

No stream is shared, so what a request draws does not depend on who else runs, nor on how many
tokens a step verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from parlay.engine.request import Request, SamplingParams
from parlay.engine.transfer import upload
from parlay.policies.types import Array

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


def mix64s(x: Array) -> Array:
    """Return `mix64` of each element of a u64 array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


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


def draw_keys(request_keys: Array, positions: Array, purpose: Purpose) -> Array:
    """Return `draw_key` of u64 keys and output positions, which broadcast: u64."""
    at = mix64s(request_keys + np.uint64(_GOLDEN) * positions.astype(np.uint64))
    return mix64s(at + np.uint64(int(purpose)))


def uniforms(keys: Array) -> Array:
    """Return `uniform` of each of u64 keys, f64."""
    drawn: Array = ((mix64s(keys) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return drawn


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
    return noise(key, ids)


def noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Return `exponentials` of keys i64 [keys], the bits of those that are u64."""
    x = keys[:, None] + (ids + 1) * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    return -torch.log((_shift(x, 12).double() + 0.5) * 2.0**-52)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return float64 [rows, vocab]: each row's law after temperature (> 0), top-k and top-p."""
    return laws(logits, *upload(logits.device, *shaping(params, logits.shape[-1])))


def shaping(params: Sequence[SamplingParams], vocab: int) -> list[Array]:
    """Return what `laws` needs of rows drawn by `params`: temperature f64 [rows], and where any of
    them filters, top-k i64 and top-p f64 [rows].
    """  # noqa: D205
    found = [np.asarray([p.temperature for p in params], np.float64)]
    if any(p.top_k or p.top_p < 1.0 for p in params):
        found.append(np.asarray([min(p.top_k or vocab, vocab) for p in params], np.int64))
        # Off is inf: a row beside one with top-p must not lose its tail where sums round up to 1.
        mass = [p.top_p if p.top_p < 1.0 else np.inf for p in params]
        found.append(np.asarray(mass, np.float64))
    return found


def laws(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> Tensor:
    """Return `probabilities` of rows whose parameters lie on the device as `shaping` has them."""
    # Differences from the largest: a temperature near 0 makes them -inf, never inf - inf.
    exact = logits.double()
    scaled = (exact - exact.amax(-1, keepdim=True)) / temperature[:, None]
    if top_k is not None and top_p is not None:
        scaled = _filtered(scaled, top_k[:, None], top_p[:, None])
    return torch.softmax(scaled, -1)


def _filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Hide what top-k and top-p [rows, 1] exclude; ties at the edge stay in by token id."""
    order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    beyond = torch.arange(scaled.shape[-1], device=scaled.device) >= top_k
    law = torch.softmax(order.values.masked_fill(beyond, float("-inf")), -1)
    # A token stays while the mass before it is below top_p: the first always does.
    beyond |= law.cumsum(-1) - law >= top_p
    return scaled.masked_fill(beyond.gather(1, order.indices.argsort(-1)), float("-inf"))


def race(law: Tensor, keys: Sequence[int], ids: Tensor) -> Tensor:
    """Draw one index of `law` [rows, n] per row, by the noise of token ids [n]; i64 [rows]."""
    return (law / exponentials(keys, ids)).argmax(-1)


def race_by(law: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Do as `race` with keys i64 [rows] that lie on the device, the bits of u64."""
    return (law / noise(keys, ids)).argmax(-1)


_CHUNK = 128


def first_choices(logits: Tensor) -> Tensor:
    """Return i64 [rows]: the first of the largest logits [rows, vocab] of each row."""
    rows, vocab = logits.shape
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    if logits.dtype is not torch.bfloat16 or vocab % _CHUNK:
        return logits.float().argmax(-1)
    # Bits of floats above 0 rise as the floats do, and those of the others are negative as i16.
    # Maxima of i16 are vectorised: a tenth of float32's argmax, which has a fifth of bf16's.
    bits = logits.contiguous().view(torch.int16).view(rows, -1, _CHUNK)
    peak, chunk = bits.amax(-1).to(torch.int32).max(-1)
    if int(peak.min()) <= 0:
        return logits.float().argmax(-1)
    inside = bits[torch.arange(rows), chunk].to(torch.int32).argmax(-1)
    return chunk * _CHUNK + inside
