"""Messages as they were on the wire when they were recorded; whatever comes later must read them.

`python -m tests.wire_corpus` appends what is new: a line that stands in the corpus is never changed
or removed. Each has the bytes, and what they say as JSON.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from parlay.policies.policy import EngineLimits, make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import PROPOSERS, Plan, PlanSource, StopKind, StopRule, TaskDefaults
from parlay.protos import codec
from parlay.v1 import admin_pb2, policy_pb2, stats_pb2

CORPUS = Path(__file__).parent / "unit" / "wire" / "corpus.jsonl"
FILES = (policy_pb2, admin_pb2, stats_pb2)


@dataclasses.dataclass(slots=True, frozen=True)
class Entry:
    """One message. name tells what is special; kind: its full type name; says: its fields."""

    name: str
    kind: str
    data: bytes
    says: dict[str, Any]

    @property
    def type(self) -> type[Message]:
        """Return the message's class in the typed schema."""
        return class_of(self.kind)

    def parsed(self) -> bytes:
        """Return what this release reads, without fields that it does not know, encoded."""
        message = self.type.FromString(self.data)
        message.DiscardUnknownFields()
        return message.SerializeToString(deterministic=True)

    def meant(self) -> bytes:
        """Return what was said when it was recorded, encoded by this release."""
        return ParseDict(self.says, self.type()).SerializeToString(deterministic=True)

    def line(self) -> str:
        """Return the entry as a line of the corpus."""
        data = base64.b64encode(self.data).decode()
        fields = {"name": self.name, "kind": self.kind, "data": data, "says": self.says}
        return json.dumps(fields, separators=(",", ":"))


def class_of(kind: str) -> type[Message]:
    """Return the class of a message of parlay.v1 by its full name."""
    name = kind.removeprefix("parlay.v1.")
    found: type[Message] = next(getattr(f, name) for f in FILES if hasattr(f, name))
    return found


def read() -> list[Entry]:
    """Return the corpus."""
    entries = []
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        data = base64.b64decode(fields["data"])
        entries.append(Entry(fields["name"], fields["kind"], data, fields["says"]))
    return entries


def methods() -> Iterator[tuple[str, Descriptor, Descriptor]]:
    """Yield every method of parlay.v1: its full name, what it takes and what it returns."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield method.full_name, method.input_type, method.output_type


# --- What is recorded ----------------------------------------------------------------------------


def _entry(name: str, kind: str, data: bytes) -> Entry:
    message = class_of(kind).FromString(data)
    message.DiscardUnknownFields()
    return Entry(name, kind, data, MessageToDict(message, preserving_proto_field_name=True))


def spoken() -> Iterator[Entry]:
    """Yield what an engine and a sidecar say to each other, as this release encodes it."""
    asks, answers = "parlay.v1.SteerRequest", "parlay.v1.SteerResponse"
    limits = EngineLimits(0b1111, 64, (1, 2, 4, 8), 8192)
    for name, hello in (
        ("hello", codec.Hello("replica-0", LIMITS, 2**55 + 1)),
        ("hello with bucket edges and every proposer", codec.Hello("\u00e9/1", limits)),
    ):
        yield _entry(name, asks, codec.encode_request(hello))
    history, outcome = History(3), None
    for policy in ("none", "fixed", "thompson", "goodput", "pilot"):
        decides = make_policy(policy, None, LIMITS)
        for step in ("first", "second"):
            view = history.view()
            report = codec.StepReport(outcome, view)
            yield _entry(f"{step} report under {policy}", asks, codec.encode_request(report))
            plan = decides.decide(view)
            yield _entry(f"{step} plan of {policy}", answers, codec.encode_response(plan))
            outcome = history.step(plan, PlanSource.REMOTE)
            decides.observe(outcome)
    full = _full(plan)
    yield _entry("full plan", answers, codec.encode_response(full))
    assert full.calibration is not None
    full.calibration = full.calibration[:, :, None] + 0.5 * np.arange(3, dtype=np.float32)
    yield _entry("calibrated by place", answers, codec.encode_response(full))
    yield _entry("outcome alone", asks, codec.encode_request(codec.StepReport(outcome, None)))
    yield _entry("report of nothing", asks, codec.encode_request(codec.StepReport(None, None)))
    yield _entry("bye", asks, codec.encode_request(codec.Bye("upgraded")))
    yield _entry("welcome", answers, codec.encode_response(codec.Welcome("goodput", True, 2**40)))
    yield _entry("first welcome", answers, codec.encode_response(codec.Welcome("none", False)))
    yield _entry("draining", answers, codec.encode_response(codec.Config(draining=True)))
    view, hello = History(2).view(), codec.Hello("simple", LIMITS)
    decision = make_policy("goodput", None, LIMITS).decide(view)
    assert outcome is not None
    for kind, data in (
        ("DecideRequest", codec.encode_decide(hello, view)),
        ("DecideResponse", codec.encode_decision(decision)),
        ("ReportRequest", codec.encode_report("simple", outcome)),
        ("ReportResponse", codec.encode_receipt(True)),
    ):
        yield _entry("unary", f"parlay.v1.{kind}", data)


def _full(plan: Plan) -> Plan:
    """Return the plan with everything that a plan may have."""
    return dataclasses.replace(
        plan,
        defaults=TaskDefaults(
            np.array([0, 7], np.uint32), np.array([1, 2], np.uint8), np.array([2, 5], np.int16)
        ),
        budget_tokens=9,
        stop_rule=StopRule(StopKind.ENTROPY, 0.25),
        calibration=np.arange(2.0 * PROPOSERS, dtype=np.float32).reshape(PROPOSERS, 2),
    )


def oddly_encoded() -> Iterator[Entry]:
    """Yield messages that other senders make of the same words, and newer ones with more."""
    asks = "parlay.v1.SteerRequest"
    said = codec.encode_request(codec.StepReport(None, History(3).view()))
    message: Any = policy_pb2.SteerRequest.FromString(said)
    tasks = list(message.step_report.view.task)
    message.step_report.view.ClearField("task")
    body = message.step_report.view.SerializeToString()
    unpacked = b"".join(b"\x5d" + task.to_bytes(4, "little") for task in tasks)
    report = wrapped(2, wrapped(2, body + unpacked))
    yield _entry("unpacked column", asks, report)
    yield _entry("fields of a later release", asks, report + wrapped(31, b"later"))
    proposers = codec.encode_request(codec.Hello("x", LIMITS))
    newer: Any = policy_pb2.SteerRequest.FromString(proposers)
    newer.hello.proposers.append(9)
    yield _entry("proposer of a later release", asks, newer.SerializeToString())


def wrapped(number: int, body: bytes) -> bytes:
    """Return a field that holds bytes, encoded: a message, a text, or one of a later release."""
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def filled() -> Iterator[Entry]:
    """Yield a message of every type that a method takes or returns, with every field set."""
    seen = set()
    for _, *kinds in methods():
        for kind in kinds:
            if kind.full_name not in seen:
                seen.add(kind.full_name)
                message = class_of(kind.full_name)()
                _fill(message, 0)
                yield _entry("every field", kind.full_name, message.SerializeToString())


def _fill(message: Any, depth: int) -> None:
    for number, field in enumerate(message.DESCRIPTOR.fields, 1):
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth == 4:
                continue
            target = getattr(message, field.name)
            if not field.is_repeated:
                target.SetInParent()
                _fill(target, depth + 1)
            elif field.message_type.GetOptions().map_entry:
                target["key"] = "value"
            else:
                _fill(target.add(), depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend([_sample(field, number), _sample(field, 1)])
        else:
            setattr(message, field.name, _sample(field, number))


def _sample(field: FieldDescriptor, number: int) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return f"{field.name} \u00e9".encode() if field.type == field.TYPE_BYTES else field.name
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return number + 0.5
    return 1 if kind == FieldDescriptor.CPPTYPE_ENUM else number


def record() -> int:
    """Append what the corpus does not have yet; return how many lines."""
    have = {(e.name, e.kind) for e in read()} if CORPUS.exists() else set()
    new: dict[tuple[str, str], Entry] = {}
    for entry in (*spoken(), *oddly_encoded(), *filled()):
        assert (entry.name, entry.kind) not in new
        new[(entry.name, entry.kind)] = entry
    lines = [entry.line() + "\n" for key, entry in new.items() if key not in have]
    with CORPUS.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return len(lines)


if __name__ == "__main__":
    print(f"{record()} new lines in {CORPUS}")
