"""Cost profiles that `parlay gpu-check` measured: a grid of times becomes a curve and an attention.

A pass is measured over batch x width x context; a cost model (`cost_tables.PassCost`) is a curve
over the pass's tokens, attention's time by requests and context beside it, and the arithmetic of
attention. Attention is what longer contexts take more, at the narrowest widths, where it only
reads; below the shortest context it goes down to nothing as a line. The curve is what is left of
the grid at its shortest context: tokens are batch times width, and times that fall as tokens grow
are pooled (isotonic regression by pool adjacent violators; Ayer et al. 1955). So the model rises in
tokens, requests and context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from parlay.policies.types import Array

KIND = "parlay.gpu-check/1"
_AXES = ("batch", "width", "context_tokens")
_MOST = {"batch": 1 << 16, "width": 1 << 10, "context_tokens": 1 << 24}
_MOST_MS = 60_000.0
_FALL = 2.0
"""A grid whose largest pass takes a share of the smallest one's time below 1 / so much is none."""
_NARROW = 4
_MOST_SHARE = 0.5
_BOUND = 1.1
"""Attention that takes so many times what reading takes is bound by its arithmetic."""


def profile_in(name: str, document: object, shape: str) -> object:
    """Return the profile that a JSON file holds, its grids made curves; shape "": the last one.

    A file that is no document of `parlay gpu-check` is the profile. Raises ValueError in one line
    where the shape is not there, or a grid cannot be.
    """
    profile = document
    if isinstance(document, Mapping) and document.get("kind") == KIND:
        profiles = document.get("profiles")
        if not isinstance(profiles, Mapping) or not profiles:
            raise ValueError(f"{name} holds no whole profile: run `parlay gpu-check` again")
        chosen = shape or list(profiles)[-1]
        if chosen not in profiles:
            raise ValueError(f"{name} has no shape '{chosen}'; it has {', '.join(profiles)}")
        profile = profiles[chosen]
    elif shape:
        raise ValueError(f"{name} is one profile: leave '#{shape}' out")
    if not isinstance(profile, Mapping):
        return profile
    return {key: _pass(f"{name}.{key}", value) for key, value in profile.items()}


def _pass(where: str, given: Any) -> Any:
    """Return a pass with its grid made curves; anything else as it is."""
    if not isinstance(given, Mapping) or "grid" not in given:
        return given
    return pass_of(*grid_of(f"{where}.grid", given["grid"]))


def grid_of(where: str, given: Any) -> tuple[Array, Array, Array, Array]:
    """Return batch, width, context [n] each and ms [batches, widths, contexts], nan: left out.

    Raises ValueError naming the axis or cell that is missing, out of range or out of order, for a
    grid with too little in it, and one whose times fall as passes grow.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a JSON object, not {type(given).__name__}")
    batch, width, context = (_axis(where, given, name) for name in _AXES)
    ms = _table(f"{where}.ms", given.get("ms"), (len(batch), len(width), len(context)))
    if len(batch) < 2 or len(context) < 2:
        raise ValueError(f"{where} needs at least two batches and two contexts; measure again")
    for b, c in ((0, 0), (-1, 0), (0, -1)):
        if math.isnan(ms[b, 0, c]):
            cell = f"batch {batch[b]}, context {context[c]}"
            raise ValueError(f"{where} lacks {cell}, an end of its axes; measure again")
    first, last = float(ms[0, 0, 0]), float(ms[~np.isnan(ms)][-1])
    if last * _FALL < first:
        raise ValueError(
            f"{where}: its largest pass takes {last:g} ms, its smallest {first:g}: measure again"
        )
    return batch, width, context, ms


def _axis(where: str, given: Mapping[str, Any], name: str) -> Array:
    axis = given.get(name)
    if not isinstance(axis, list) or not axis:
        raise ValueError(f"{where} needs '{name}', a list of whole numbers")
    for value in axis:
        if type(value) is not int or not 1 <= value <= _MOST[name]:
            raise ValueError(
                f"{where}.{name} must hold whole numbers from 1 to {_MOST[name]}, not {value!r}"
            )
    if any(b <= a for a, b in pairwise(axis)):
        raise ValueError(f"{where}.{name} must ascend")
    return np.array(axis, np.int64)


def _table(where: str, given: Any, shape: tuple[int, ...]) -> Array:
    """Return a nested list as f64; null is nan."""
    if not shape:
        if given is None:
            return np.array(math.nan)
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or not 0.0 < given <= _MOST_MS:
            raise ValueError(f"{where} must hold ms above 0, at most {_MOST_MS:g}, not {given!r}")
        return np.array(float(given))
    if not isinstance(given, list) or len(given) != shape[0]:
        raise ValueError(f"{where} must be lists as long as the axes, {shape[0]} here")
    return np.stack([_table(where, part, shape[1:]) for part in given])


def pass_of(batch: Array, width: Array, context: Array, ms: Array) -> dict[str, Any]:
    """Return a pass as `cost_tables.parse_profile` reads it."""
    tokens = batch[:, None] * width
    here = ~np.isnan(ms[:, :, 0])
    points = np.unique(tokens[here])
    read = attention_of(batch, context, ms[:, width <= max(_NARROW, width[0])])
    bare = np.maximum(ms[:, :, 0] - read[:, :1], (1.0 - _MOST_SHARE) * ms[:, :, 0])
    known = [bare[here & (tokens == n)] for n in points]
    curve = rising(np.array([v.mean() for v in known]), np.array([len(v) for v in known]))
    beside = ms - ms[:, :, :1]
    return {
        "tokens": points.tolist(),
        "ms": curve.tolist(),
        "attention": {
            "requests": batch.tolist(),
            "context_tokens": [0, *context.tolist()],
            "ms": np.pad(read, ((0, 0), (1, 0))).tolist(),
        },
        "row_context_ms": _row_context_ms(tokens, context, beside, read - read[:, :1]),
    }


def rising(values: Array, weights: Array) -> Array:
    """Return the rising sequence nearest to values [n] by weighted least squares."""
    pools: list[list[float]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            high, more, many = pools.pop()
            low, some, few = pools[-1]
            pools[-1] = [(low * some + high * more) / (some + more), some + more, few + many]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])


def attention_of(batch: Array, context: Array, ms: Array) -> Array:
    """Return ms [batches, contexts] of attention, medians over widths, rising along both axes.

    The shortest context takes its part of what the next takes more, a token at the same rate, at
    most _MOST_SHARE of the pass. What was left out goes on from the context before at the dearest
    rate a KV token has there in any batch.
    """
    beside = np.full((len(batch), len(context)), math.nan)
    more = ms - ms[:, :, :1]
    for b, c in np.ndindex(beside.shape):
        seen = more[b, :, c][~np.isnan(more[b, :, c])]
        if len(seen):
            beside[b, c] = max(float(np.median(seen)), 0.0)
    beside[:, 0] = 0.0
    for c in range(1, len(context)):
        step = np.diff(beside[:, c - 1 : c + 1])[:, 0]
        step /= batch * float(context[c] - context[c - 1])
        rate = float(step[~np.isnan(step)].max(initial=0.0))
        gap = np.isnan(beside[:, c])
        beside[gap, c] = beside[gap, c - 1] + rate * batch[gap] * (context[c] - context[c - 1])
    first = beside[:, 1] * context[0] / (context[1] - context[0])
    first = np.minimum(first, _MOST_SHARE * np.nan_to_num(ms[:, :, 0], nan=np.inf).min(1))
    return np.maximum.accumulate(np.maximum.accumulate(beside + first[:, None], 0), 1)


def _row_context_ms(tokens: Array, context: Array, beside: Array, read: Array) -> float:
    """Return the least that a row's arithmetic takes a token of context, where it is what bounds;
    at most what keeps it from bounding elsewhere.

    beside [batches, widths, contexts]: what a context takes more than the shortest.
    """  # noqa: D205
    beside, pairs = beside[:, :, 1:], tokens[:, :, None] * context[1:].astype(float)
    most = np.broadcast_to(_BOUND * read[:, None, 1:], beside.shape)
    known = ~np.isnan(beside)
    bound = known & (np.nan_to_num(beside) > most)
    if not bound.any():
        return 0.0
    return float((np.where(bound, np.nan_to_num(beside), most) / pairs)[known].min())
