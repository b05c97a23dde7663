"""One more token of each row a pass, with all but the tokens laid out before the first."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parlay.engine.kernels.flight import Pass
from parlay.engine.kernels.native import NativeKV, NativeLlama
from parlay.policies.types import Array


class NativeOnward:
    """Rows whose next tokens are read one at a time, up to `passes` of them.

    tables: each row's blocks, which stay as they are meanwhile; places: where in the cache its next
    token goes. A pass over the weights leaves nothing of Python in the processor's caches, so that
    each line beside it takes several times as long as it looks: hence few.
    """

    def __init__(
        self,
        model: NativeLlama,
        cache: NativeKV,
        tables: Sequence[Sequence[int]],
        places: Sequence[int],
        passes: int,
    ) -> None:
        self._model, self._struct = model, cache.model
        self._blocks = np.asarray([block for table in tables for block in table], np.int32)
        sizes = [self._blocks.itemsize * len(table) for table in tables]
        begins = itertools.accumulate(sizes[:-1], initial=self._blocks.ctypes.data)
        self._table = np.asarray(list(begins), np.int64)
        self._place = np.asarray(places, np.int32)
        last = int(self._place.max()) + passes
        self._scratch = model.scratch_for(self._struct, len(tables), last)
        self._normed = torch.empty(len(tables), model.config.hidden, dtype=model.dtype)

    def read(self, rows: Array, tokens: Array, step: int) -> Tensor:
        """Read the step-th token, from 0, of rows i64; return logits [rows, head rows]."""
        place, table = self._place[rows], self._table[rows]
        base = place + np.int32(step + 1)
        residual = self._model.embed(torch.from_numpy(tokens)).float()
        normed = self._normed[: len(rows)]
        one_pass = Pass(
            rows=len(rows),
            base=base.ctypes.data,
            table=table.ctypes.data,
            x=residual.data_ptr(),
            normed=normed.data_ptr(),
            scratch=self._scratch.data_ptr(),
        )
        self._model.kernels.parlay_forward(ctypes.byref(self._struct), ctypes.byref(one_pass))
        return self._model.logits(normed)
