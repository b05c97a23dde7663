"""Messages that no honest peer sends, made from those that one does: most are almost right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

INTEGERS = (0, 1, -1, 2, 3, 4, 63, 64, 65, 4096, 4097, 16384, 2**31 - 1, -(2**31), 2**32 - 1)
LONG = (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (
    *(float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -1.0, 0.5, 1.0, 1.0001, 64.0),
    *(1e-45, 1e-38, 1e7, 1e30, 3.4e38, -3.4e38),
)
DOUBLES = (5e-324, 1e300, 1.7e308, -1.7e308)
TEXTS = ("", "e", "e" * 128, "e" * 129, "\u00e9" * 64, "\u00e9" * 65, "a\nb", "\0", "../../etc")
_KIND = FieldDescriptor


class Fuzzer:
    """Draws hostile messages of a type from honest ones; the same seed draws the same.

    honest: encoded messages, in the order they were sent. kind: their type, in the typed schema.
    """

    def __init__(self, seed: int, honest: Sequence[bytes], kind: type[Message]) -> None:
        self.rng = np.random.default_rng(seed)
        self._honest, self._kind = list(honest), kind

    def message(self) -> bytes:
        """Return the next message."""
        draw = float(self.rng.random())
        if draw < 0.15:
            # Replayed as it was, and most likely out of order.
            return self._one()
        if draw < 0.65:
            return self._edited(self._one())
        if draw < 0.90:
            return self._broken(self._one())
        if draw < 0.95:
            return self._spliced(self._one(), self._one())
        return self.rng.bytes(int(self.rng.integers(0, 300)))

    def _one(self) -> bytes:
        return self._honest[int(self.rng.integers(len(self._honest)))]

    def _edited(self, data: bytes) -> bytes:
        """Change some fields of a message, to values that are wrong or at an edge."""
        message = self._kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return data
        for _ in range(int(self.rng.integers(1, 4))):
            self._edit(self._node(message))
        return message.SerializeToString()

    def _node(self, message: Message) -> Message:
        """Return the message or one within it, those deep inside as likely as others."""
        nodes, found = [message], list[Message]()
        while nodes:
            node = nodes.pop()
            found.append(node)
            for field, value in node.ListFields():
                if field.cpp_type == _KIND.CPPTYPE_MESSAGE and not field.is_repeated:
                    nodes.append(value)
        # The last ones have the columns.
        return found[-1 - int(self.rng.integers(len(found)) * self.rng.random())]

    def _edit(self, node: Message) -> None:
        fields: Any = list(node.DESCRIPTOR.fields)
        field = fields[int(self.rng.integers(len(fields)))]
        if field.cpp_type == _KIND.CPPTYPE_MESSAGE:
            if self.rng.random() < 0.5:
                node.ClearField(field.name)
            elif not field.is_repeated:
                getattr(node, field.name).SetInParent()
        elif field.is_repeated:
            self._edit_column(getattr(node, field.name), field)
        else:
            setattr(node, field.name, self._value(field))

    def _edit_column(self, column: Any, field: FieldDescriptor) -> None:
        draw = float(self.rng.random())
        if draw < 0.55 and len(column):
            column[int(self.rng.integers(len(column)))] = self._value(field)
        elif draw < 0.70:
            column.append(self._value(field))
        elif draw < 0.80 and len(column):
            del column[int(self.rng.integers(len(column))) :]
        elif draw < 0.90 and len(column):
            # A row twice, and another one missing.
            column[0] = column[len(column) - 1]
        elif draw < 0.99:
            column.extend([self._value(field)] * int(self.rng.integers(1, 40)))
        else:
            column.extend([self._value(field)] * 20_000)

    def _value(self, field: FieldDescriptor) -> Any:
        kind, rng, values = field.cpp_type, self.rng, tuple[float, ...]()
        if kind in (_KIND.CPPTYPE_FLOAT, _KIND.CPPTYPE_DOUBLE):
            values = FLOATS + DOUBLES if kind == _KIND.CPPTYPE_DOUBLE else FLOATS
            return values[int(rng.integers(len(values)))]
        if kind == _KIND.CPPTYPE_BOOL:
            return bool(rng.integers(2))
        if kind == _KIND.CPPTYPE_STRING:
            return TEXTS[int(rng.integers(len(TEXTS)))]
        if kind == _KIND.CPPTYPE_ENUM:
            return int(rng.integers(-2, 100))
        low, high = _RANGES[kind]
        values = tuple(v for v in INTEGERS + LONG if low <= v <= high)
        return values[int(rng.integers(len(values)))]

    def _broken(self, data: bytes) -> bytes:
        """Change, add, remove or cut off some bytes."""
        broken = bytearray(data)
        for _ in range(int(self.rng.integers(1, 5))):
            place = int(self.rng.integers(len(broken) + 1))
            draw = float(self.rng.random())
            if draw < 0.60 and place < len(broken):
                broken[place] = int(self.rng.integers(256))
            elif draw < 0.75:
                broken[place:place] = self.rng.bytes(int(self.rng.integers(1, 9)))
            elif draw < 0.90:
                del broken[place : place + int(self.rng.integers(1, 9))]
            else:
                del broken[place:]
        return bytes(broken)

    def _spliced(self, left: bytes, right: bytes) -> bytes:
        cuts = self.rng.random(2)
        return left[: int(cuts[0] * len(left))] + right[int(cuts[1] * len(right)) :]


_RANGES = {
    _KIND.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _KIND.CPPTYPE_UINT32: (0, 2**32 - 1),
    _KIND.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _KIND.CPPTYPE_UINT64: (0, 2**64 - 1),
}
