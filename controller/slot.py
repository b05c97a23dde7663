"""Statistics as bytes, in Redis and in the state file: named arrays, a version, a checksum.

    0  4  magic "prly"
    4  2  schema version
    6  2  unused, 0
    8  4  CRC-32 of everything behind it
    12 4  bytes of the index
    16    index, JSON: [[name, dtype, shape], ...]; then the arrays, little-endian, in that order

Nothing in it is run: a reader takes numbers of listed types and lengths, or refuses the whole.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping

import numpy as np

from parlay.policies.acceptance import CHANNELS
from parlay.policies.counts import Counts
from parlay.policies.types import Array

SCHEMA = 1
MOST_BYTES = 16 << 20
_HEAD = struct.Struct("<4sHHII")
_MAGIC = b"prly"
_DTYPES = {
    np.dtype(kind).str: np.dtype(kind)
    for kind in ("<f8", "<f4", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1")
}


class Damaged(ValueError):
    """The bytes are not what this version writes."""


def encode(arrays: Mapping[str, Array]) -> bytes:
    """Return arrays as bytes; raises ValueError for types other than numbers and booleans."""
    index, parts = [], []
    for name, array in arrays.items():
        values = np.asarray(array)
        values = values.astype(values.dtype.newbyteorder("<"), order="C", copy=False)
        if values.dtype.str not in _DTYPES:
            raise ValueError(f"array {name} of type {values.dtype} cannot be stored")
        index.append([name, values.dtype.str, list(values.shape)])
        parts.append(values.tobytes())
    text = json.dumps(index, separators=(",", ":")).encode()
    size = struct.pack("<I", len(text))
    check = zlib.crc32(b"".join([size, text, *parts]))
    return b"".join([_HEAD.pack(_MAGIC, SCHEMA, 0, check, len(text)), text, *parts])


def decode(data: bytes) -> dict[str, Array]:
    """Undo `encode`; the arrays are the caller's own. Raises Damaged, a ValueError."""
    if not _HEAD.size <= len(data) <= MOST_BYTES:
        raise Damaged(f"{len(data)} bytes are no slot")
    magic, schema, _, check, size = _HEAD.unpack_from(data)
    if magic != _MAGIC or schema != SCHEMA:
        raise Damaged(f"a slot of schema {schema}, not {SCHEMA}")
    if zlib.crc32(memoryview(data)[12:]) != check:
        raise Damaged("the checksum is wrong")
    try:
        return _arrays(data, size)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Damaged(f"the index is wrong: {error}") from None


def _arrays(data: bytes, size: int) -> dict[str, Array]:
    at, arrays = _HEAD.size + size, dict[str, Array]()
    for name, kind, shape in json.loads(data[_HEAD.size : at]):
        dtype, lengths = _DTYPES[kind], [int(n) for n in shape]
        if min(lengths, default=0) < 0:
            raise ValueError("a negative length")
        count = math.prod(lengths)
        if at + count * dtype.itemsize > len(data):
            raise ValueError("an array ends behind the end")
        arrays[str(name)] = np.frombuffer(data, dtype, count, at).reshape(lengths).copy()
        at += count * dtype.itemsize
    if at != len(data):
        raise ValueError("bytes are left over")
    return arrays


def counts_in(data: bytes, k_max: int) -> Counts | None:
    """Return a slot's counts, None where it is damaged or does not fit."""
    try:
        return Counts.of_arrays(decode(data), CHANNELS, k_max)
    except ValueError:
        return None
