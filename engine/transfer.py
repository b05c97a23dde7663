"""Between host and device: all that a stage needs up in one copy, all that it found down in one.

A copy from ordinary memory, and every look at a value that lies on a GPU, makes the host wait for
all that the GPU has been given. Here copies go by page-locked memory: the host waits where it
reads, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.policies.types import Array

_ALIGNED = 16
"""Bytes: every array of an upload begins at a multiple, so that any dtype may be viewed there."""


@dataclass(slots=True)
class Sent:
    """An array on its way; tensor: on the device once `Upload.send` has been called."""

    tensor: Tensor


class Upload:
    """Host arrays for one device: `add` each, `send` once, then take their tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sent: list[Sent] = []

    def add(self, array: Array) -> Sent:
        """Take an array along; it must not be written to before it is sent."""
        sent = Sent(torch.from_numpy(np.ascontiguousarray(array)))
        self._sent.append(sent)
        return sent

    def send(self) -> None:
        """Copy everything at once; the host does not wait. On a CPU nothing is copied."""
        if self.device.type == "cpu" or not self._sent:
            return
        tensors = [s.tensor for s in self._sent]
        moved = packed(tensors, self.device.type == "cuda").to(self.device, non_blocking=True)
        for sent, tensor in zip(self._sent, unpacked(moved, tensors), strict=True):
            sent.tensor = tensor


def upload(device: torch.device, *arrays: Array) -> list[Tensor]:
    """Return arrays as tensors on a device, by one copy for which the host does not wait."""
    load = Upload(device)
    sent = [load.add(a) for a in arrays]
    load.send()
    return [s.tensor for s in sent]


def packed(tensors: Sequence[Tensor], pin: bool) -> Tensor:
    """Return u8: the bytes of CPU tensors behind each other, each at a multiple of 16."""
    held = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pin)
    for target, tensor in zip(unpacked(held, tensors), tensors, strict=True):
        target.copy_(tensor)
    return held


def unpacked(held: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `packed` bytes, wherever they lie now, shaped as the tensors were."""
    found, at = [], 0
    for like in likes:
        size = like.numel() * like.element_size()
        found.append(held[at : at + size].view(like.dtype).view(like.shape))
        at += _room(like)
    return found


def _room(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size + -size % _ALIGNED


class Reading:
    """Tensors of one device on their way to the host, in one copy; `arrays` waits for it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._shapes = [t.shape for t in tensors]
        self._floats = [t.dtype.is_floating_point for t in tensors]
        self._held: Tensor | None = None
        if tensors and tensors[0].device.type != "cpu":
            flat = torch.cat([_words(t) for t in tensors])
            self._held = torch.empty(len(flat), dtype=torch.int64, pin_memory=True)
            self._held.copy_(flat, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(flat.device))

    def arrays(self) -> list[Array]:
        """Return the tensors as arrays: floats f64 and all else i64 where they come off a GPU."""
        if self._held is None:
            return [t.numpy() for t in self._tensors]
        self._done.synchronize()
        return from_words(self._held.numpy(), self._shapes, self._floats)


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's values as i64, flat; of floats the bits as f64, which holds them all."""
    if tensor.dtype.is_floating_point:
        return tensor.double().reshape(-1).view(torch.int64)
    return tensor.long().reshape(-1)


def from_words(words: Array, shapes: Sequence[torch.Size], floats: Sequence[bool]) -> list[Array]:
    """Return the arrays whose values as i64 stand behind each other; floats: which are f64."""
    found, at = [], 0
    for shape, is_float in zip(shapes, floats, strict=True):
        flat = words[at : at + shape.numel()]
        found.append((flat.view(np.float64) if is_float else flat).reshape(tuple(shape)))
        at += shape.numel()
    return found


def send_into(target: Tensor, values: Tensor | Array) -> None:
    """Write values into a tensor of their shape; the host does not wait for its device."""
    if isinstance(values, Tensor):
        target.copy_(values, non_blocking=True)
        return
    source = torch.from_numpy(np.ascontiguousarray(values))
    (staged,) = unpacked(packed([source], target.device.type == "cuda"), [source])
    target.copy_(staged, non_blocking=True)
