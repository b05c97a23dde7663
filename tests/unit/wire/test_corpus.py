"""What was ever said on the wire goes on being understood, as it was meant."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from tests import wire_corpus
from tests.wire_corpus import CORPUS, Entry

from parlay.protos import codec
from parlay.v1 import policy_pb2 as typed

ENTRIES = wire_corpus.read()
RECORDED = {65: "edeebd3ba7a4f24899265297d3b5222c1575e7e3b808a6c7e20db942e52a3171"}
"""SHA-256 of so many first lines: they were recorded once and are never changed again."""
READERS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "SteerRequest": (codec.decode_request, codec.encode_request),
    "SteerResponse": (codec.decode_response, codec.encode_response),
    "DecideRequest": (codec.decode_decide, lambda both: codec.encode_decide(*both)),
    "DecideResponse": (codec.decode_decision, codec.encode_decision),
    "ReportRequest": (codec.decode_report, lambda both: codec.encode_report(*both)),
}


def kind(entry: Entry) -> str:
    return entry.kind.rpartition(".")[2]


def ids(entry: Entry) -> str:
    return f"{kind(entry)}: {entry.name}"


def test_what_was_recorded_stands() -> None:
    lines = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    for count, digest in RECORDED.items():
        assert hashlib.sha256("".join(lines[:count]).encode()).hexdigest() == digest
    names = [(entry.name, entry.kind) for entry in ENTRIES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("entry", ENTRIES, ids=ids)
def test_a_recorded_message_says_what_it_said(entry: Entry) -> None:
    assert entry.parsed() == entry.meant()


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.name != "every field" and kind(e) in READERS], ids=ids
)
def test_a_recorded_message_is_taken_by_the_codec_and_comes_back(entry: Entry) -> None:
    name = kind(entry)
    decode, encode = READERS[name]
    again = entry.type.FromString(encode(decode(entry.data)))
    wanted = entry.type.FromString(entry.data)
    wanted.DiscardUnknownFields()
    if name == "SteerRequest" and wanted.HasField("hello"):
        known = [p for p in wanted.hello.proposers if p in typed.Proposer.values()]  # type: ignore[attr-defined]
        del wanted.hello.proposers[:]  # type: ignore[attr-defined]
        wanted.hello.proposers.extend(known)  # type: ignore[attr-defined]
    exact = {"deterministic": True}
    assert again.SerializeToString(**exact) == wanted.SerializeToString(**exact)


def test_every_kind_of_message_was_recorded() -> None:
    recorded = {entry.kind for entry in ENTRIES}
    missing = {
        kind.full_name
        for _, *kinds in wire_corpus.methods()
        for kind in kinds
        if kind.full_name not in recorded
    }
    assert not missing, "run python -m tests.wire_corpus"
    for name in ("SteerRequest", "SteerResponse"):
        kinds = {field.name for field in getattr(typed, name).DESCRIPTOR.fields}
        said = [getattr(typed, name).FromString(e.data) for e in ENTRIES if name in e.kind]
        assert {message.WhichOneof("message") for message in said} == kinds
