"""Texts' n-gram indexes in C, read and extended together; in Python where there is no compiler."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence

from parlay.engine.kernels import build
from parlay.engine.proposers.ngram_index import NgramIndex

_POINTER = ctypes.c_void_p


class CompiledIndex:
    """What `NgramIndex` is to one growing text, in `ngram.c`.

    match_tokens: length of the longest suffix that ended earlier. Raises RuntimeError where it
    cannot be compiled, MemoryError.
    """

    __slots__ = ("__weakref__", "_kernels", "handle", "match_tokens")

    def __init__(self) -> None:
        kernels = build.load_ngram()
        if kernels is None:
            raise RuntimeError("the n-gram index cannot be compiled on this machine")
        kernels.parlay_ngram_new.restype = _POINTER
        handle = kernels.parlay_ngram_new()
        if handle is None:
            raise MemoryError("no memory for an n-gram index")
        self._kernels, self.handle, self.match_tokens = kernels, _POINTER(handle), 0
        weakref.finalize(self, kernels.parlay_ngram_free, self.handle).atexit = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        Indexes([self]).extend([tokens])

    def propose(self, k: int) -> list[int]:
        """Return the k tokens that followed the longest suffix before; empty without a match."""
        out = (ctypes.c_int32 * k)()
        made: int = self._kernels.parlay_ngram_propose(self.handle, ctypes.c_int32(k), out)
        return out[:made]


AnyIndex = CompiledIndex | NgramIndex


def new_index() -> AnyIndex:
    """Return an empty index, compiled where it can be."""
    return NgramIndex() if build.load_ngram() is None else CompiledIndex()


class Indexes:
    """Some texts' indexes, extended in one go: a call each would cost more than the work does."""

    def __init__(self, indexes: Sequence[AnyIndex]) -> None:
        self.indexes = indexes
        compiled = [index for index in indexes if isinstance(index, CompiledIndex)]
        self._kernels = compiled[0]._kernels if len(compiled) == len(indexes) > 0 else None
        self._handles = array("Q", [index.handle.value or 0 for index in compiled])
        self._match = array("i", bytes(4 * len(compiled)))

    def extend(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Append to each text its tokens; return how long a match each ends with now."""
        if self._kernels is None:
            for index, more in zip(self.indexes, tokens, strict=True):
                index.extend(more)
            return [index.match_tokens for index in self.indexes]
        counts, flat = array("i", map(len, tokens)), array("i")
        for more in tokens:
            flat.extend(more)
        done = self._kernels.parlay_ngram_extend(
            _at(self._handles), ctypes.c_int64(len(counts)), _at(counts), _at(flat),
            _at(self._match),
        )  # fmt: skip
        if not done:
            raise MemoryError("no memory for the n-gram indexes")
        match = self._match.tolist()
        for index, length in zip(self.indexes, match, strict=True):
            index.match_tokens = length
        return match


def _at(held: array[int]) -> ctypes.c_void_p:
    return _POINTER(held.buffer_info()[0])
