"""A Llama in bfloat16 on a CPU, run by the kernels of `llama.c` a whole pass at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parlay.engine.kernels import build
from parlay.engine.kernels.flight import Flight, Laid, NativeFlight, Pass
from parlay.engine.model_config import ModelConfig
from parlay.engine.rotary import rotary_angles
from parlay.engine.spans import Spans
from parlay.engine.traits import LLAMA
from parlay.policies.types import Array

BLOCK_TOKENS = 16
"""Positions of a cache block: one vector of scores."""
HEAD_DIMS = (32, 64, 128)
PANEL = 32
_POINTER = ctypes.c_void_p


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, _POINTER)
        for name in ("input_norm", "qkv", "out", "ffn_norm", "gate_up", "down", "keys", "values")
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "layers", "context")
        ),
        ("norm_eps", ctypes.c_float),
        *((name, _POINTER) for name in ("layer", "norm", "cos", "sin")),
    ]


def fits(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether a model can be run here: one thread, bfloat16, a plain Llama, even sizes."""
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.get_num_threads() == 1
        and config.traits == LLAMA
        and config.head_dim in HEAD_DIMS
        and config.hidden % PANEL == config.ffn % PANEL == 0
        and build.load() is not None
    )


@dataclass(slots=True)
class NativeKV:
    """Keys and values of every layer in blocks of 16 positions: `llama.c` says how they lie.

    model: weights and cache as the kernels take them; it points to `layers`.
    """

    keys: list[Tensor]
    values: list[Tensor]
    layers: Any
    model: _Model
    kernels: ctypes.CDLL

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy the keys and values of slots i64 [n] to others, in every layer.

        A slot is 16 * block + offset. All are read before any is written.
        """
        source, target = from_slots.contiguous(), to_slots.contiguous()
        _, heads, _, dim = self.keys[0].shape
        held = torch.empty(len(source), 2 * heads * dim, dtype=torch.bfloat16)
        self.kernels.parlay_move(
            ctypes.byref(self.model), _POINTER(source.data_ptr()), _POINTER(target.data_ptr()),
            ctypes.c_int64(len(source)), _POINTER(held.data_ptr()),
        )  # fmt: skip


def pack(kernels: ctypes.CDLL, weights: Sequence[Tensor]) -> list[Tensor]:
    """Pack bfloat16 matrices [out, in] behind each other, in the order in which a pass reads them.

    They must be contiguous.
    """
    sizes = [-(-len(w) // PANEL) * PANEL * w.shape[1] for w in weights]
    packed = torch.empty(sum(sizes), dtype=torch.bfloat16).split(sizes)
    assert packed[0].data_ptr() % 64 == 0, "torch aligns its memory to cache lines"
    for w, p in zip(weights, packed, strict=True):
        kernels.parlay_pack(
            _POINTER(w.data_ptr()), _POINTER(p.data_ptr()), *map(ctypes.c_int64, w.shape)
        )
    return list(packed)


def packed_linear(kernels: ctypes.CDLL, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """Return x [rows, in] times a packed matrix of `outputs` rows, bfloat16 [rows, outputs]."""
    x = x.contiguous()
    y = torch.empty(len(x), outputs, dtype=torch.bfloat16)
    kernels.parlay_linear(
        _POINTER(x.data_ptr()), _POINTER(packed.data_ptr()), _POINTER(y.data_ptr()),
        *map(ctypes.c_int64, (len(x), outputs, x.shape[1])),
    )  # fmt: skip
    return y


class NativeLlama:
    """Weights packed for the kernels; see `parlay.engine.runner.Model` for what its methods do.

    Raises RuntimeError where the kernels cannot be had; ask `fits` first.
    """

    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], embedding: Tensor
    ) -> None:
        library = build.load()
        if library is None:
            raise RuntimeError("the kernels cannot be compiled or run on this machine")
        self.config, self.kernels = config, library
        library.parlay_scratch_bytes.restype = ctypes.c_int64

        def get(name: str) -> Tensor:
            return weights[f"{name}.weight"].to(torch.bfloat16).contiguous()

        self.embedding = embedding.to(torch.bfloat16).contiguous()
        self._in_proj, self._state_proj = (
            pack(library, [get(n)])[0] if f"{n}.weight" in weights else None
            for n in ("in_proj", "state_proj")
        )
        self.head_rows = config.vocab if "lm_head.weight" in weights else len(self.embedding)
        self._norms = []
        self._packed = []
        for at in (f"model.layers.{i}" for i in range(config.layers)):
            self._norms.append([get(f"{at}.{n}_layernorm") for n in ("input", "post_attention")])
            qkv = torch.cat([get(f"{at}.self_attn.{n}_proj") for n in "qkv"])
            gate_up = torch.cat([get(f"{at}.mlp.{n}_proj") for n in ("gate", "up")])
            out, down = get(f"{at}.self_attn.o_proj"), get(f"{at}.mlp.down_proj")
            self._packed.append(pack(library, [qkv, out, gate_up, down]))
        self._norm = get("model.norm")
        head = get("lm_head") if "lm_head.weight" in weights else self.embedding
        (self._head,) = pack(library, [head])
        angles = rotary_angles(config, config.context)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def new_cache(self, blocks: int, block_tokens: int) -> NativeKV:
        """Return an empty cache; raises ValueError for blocks of another size than 16."""
        if block_tokens != BLOCK_TOKENS:
            raise ValueError(
                f"the kernels keep {BLOCK_TOKENS} tokens a block, not {block_tokens};"
                f" set block_tokens to {BLOCK_TOKENS} or the environment's PARLAY_KERNELS to off"
            )
        c = self.config
        shape = (blocks, c.kv_heads, BLOCK_TOKENS, c.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=self.dtype) for _ in range(c.layers)] for _ in range(2)
        )
        layers = (_Layer * c.layers)()
        for i, layer in enumerate(layers):
            layer.input_norm, layer.ffn_norm = (n.data_ptr() for n in self._norms[i])
            layer.qkv, layer.out, layer.gate_up, layer.down = (
                p.data_ptr() for p in self._packed[i]
            )
            layer.keys, layer.values = keys[i].data_ptr(), values[i].data_ptr()
        model = _Model(
            c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn, c.layers, c.context, c.norm_eps,
            ctypes.addressof(layers), self._norm.data_ptr(),
            self._cos.data_ptr(), self._sin.data_ptr(),
        )  # fmt: skip
        return NativeKV(keys, values, layers, model, self.kernels)

    def embed(self, ids: Tensor, states: Tensor | None = None) -> Tensor:
        """Return the input of tokens; see `Model.embed`."""
        x, hidden = self.embedding[ids], self.config.hidden
        if self._in_proj is not None:
            x = packed_linear(self.kernels, x, self._in_proj, hidden)
        if states is not None:
            assert self._state_proj is not None, "this model reads no states"
            x = x + packed_linear(self.kernels, states, self._state_proj, hidden)
        return x

    def run(
        self, x: Tensor, cache: NativeKV, spans: Spans, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run every layer; see `Model.run`."""
        laid = self._laid(x, cache, spans, taps)
        self.kernels.parlay_forward(ctypes.byref(cache.model), ctypes.byref(laid.reads))
        return laid.normed, laid.states()

    def launch(
        self, x: Tensor, cache: NativeKV, spans: Spans, taps: Sequence[int], places: Array
    ) -> NativeFlight:
        """Begin what `run` does, and the logits of the pass's rows `places`, in another thread."""
        laid = self._laid(x, cache, spans, taps)
        places = np.ascontiguousarray(places, np.int64)
        logits = torch.empty(len(places), self.head_rows, dtype=self.dtype)
        flight = Flight(
            ctypes.addressof(cache.model), ctypes.addressof(laid.reads), len(places),
            self.head_rows, places.ctypes.data, self._head.data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        return NativeFlight(self.kernels, flight, laid, places, logits)

    def _laid(self, x: Tensor, cache: NativeKV, spans: Spans, taps: Sequence[int]) -> Laid:
        c, rows = self.config, len(x)
        base, mask = spans.seen()
        base, deepest = base.astype(np.int32), int(spans.positions().max()) + 1
        tables = [np.asarray(t, np.int32) for t in spans.tables]
        table = np.repeat(np.asarray([t.ctypes.data for t in tables], np.int64), spans.lengths)
        below = np.asarray([t for t in taps if t < c.layers], np.int64)
        residual = x.float()
        normed = torch.empty(rows, c.hidden, dtype=self.dtype)
        tapped = torch.empty(rows, len(below), c.hidden, dtype=self.dtype)
        scratch = self.scratch_for(cache.model, rows, deepest)
        reads = Pass(
            rows, len(below), base.ctypes.data,
            None if spans.trees is None else mask.ctypes.data, table.ctypes.data, below.ctypes.data,
            residual.data_ptr(), normed.data_ptr(), tapped.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        held = (base, mask, tables, table, below, residual, scratch)
        return Laid(reads, normed, tapped, len(taps) > len(below), held)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, head rows] logits of normed states."""
        return packed_linear(self.kernels, hidden, self._head, self.head_rows)

    def scratch_for(self, model: _Model, rows: int, positions: int) -> Tensor:
        """Return memory for a pass over so many rows and positions; all passes share it."""
        need = self.kernels.parlay_scratch_bytes(
            ctypes.byref(model), ctypes.c_int64(rows), ctypes.c_int64(positions)
        )
        if need > len(self._scratch):
            self._scratch = torch.empty(need, dtype=torch.uint8)
        return self._scratch
