"""Tokens as text that can be sent: whole characters, cut at stops, each with its logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serving import EOS, byte_tokenizer

from parlay.engine.request import TokenLogprob
from parlay.engine.server.text import OutputText, Piece, token_bytes

TOKENIZER = byte_tokenizer()
TEXT = "naïve 日本 🎲🎲 text"


def run(ids: Sequence[int], cuts: Sequence[int], stop: Sequence[str] = ()) -> list[Piece]:
    """Push ids in runs that end at `cuts`."""
    text = OutputText(TOKENIZER, stop)
    ends = sorted({min(c, len(ids)) for c in cuts} | {len(ids)})
    runs = [ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    pieces = [text.push(run, [TokenLogprob(t, -1.0, ()) for t in run]) for run in runs]
    return [*pieces, text.finish()]


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(st.text(max_size=20), st.lists(st.integers(0, 80), max_size=8))
def test_pieces_of_any_cut_are_the_text_and_no_character_is_halved(
    text: str, cuts: list[int]
) -> None:
    pieces = run(TOKENIZER.encode(text), cuts)
    assert joined(pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, EOS), max_size=20), st.lists(st.integers(0, 20), max_size=5))
def test_any_tokens_are_their_text_and_every_one_has_its_entry(
    ids: list[int], cuts: list[int]
) -> None:
    pieces = run(ids, cuts)
    assert joined(pieces) == TOKENIZER.decode(ids)
    entries = [entry for piece in pieces for entry in piece.entries]
    assert [e.logprob.token for e in entries] == [i for i in ids if i != EOS]
    offsets = [e.offset for e in entries]
    assert offsets == sorted(offsets)


def test_bytes_of_the_entries_are_those_of_the_text() -> None:
    ids = TOKENIZER.encode(TEXT)
    for n, piece in enumerate(pieces := run(ids, range(len(ids)))):
        data = b"".join(entry.data for entry in piece.entries)
        assert data == piece.text.encode(), n
    entries = [entry for piece in pieces for entry in piece.entries]
    begins = [i for i, e in enumerate(entries) if e.data[0] & 0xC0 != 0x80]
    assert [entries[i].offset for i in begins] == list(range(len(TEXT)))


def test_a_stop_string_takes_its_entries_with_it() -> None:
    ids = TOKENIZER.encode(TEXT)
    pieces = run(ids, range(len(ids)), stop=["本 🎲"])
    assert joined(pieces) == "naïve 日"
    data = b"".join(entry.data for piece in pieces for entry in piece.entries)
    assert data == "naïve 日".encode()


def test_text_that_may_become_a_stop_is_held_back_and_let_go() -> None:
    text = OutputText(TOKENIZER, ["abc"])
    sent = [text.push([token], []).text for token in TOKENIZER.encode("xabd")]
    assert sent == ["", "", "x", "a"]
    assert text.finish().text == "bd"


@pytest.mark.parametrize("byte", [0x0A, 0x20, 0x41, 0x7F, 0x80, 0xAD, 0xC3, 0xF0, 0xFF])
def test_bytes_of_a_token_that_is_no_character(byte: int) -> None:
    (token,) = (t for t in range(256) if token_bytes(TOKENIZER, t) == bytes([byte]))
    expected = bytes([byte]).decode(errors="replace")
    assert TOKENIZER.decode([token]) == expected


def test_special_tokens_have_no_bytes() -> None:
    assert token_bytes(TOKENIZER, EOS) == b""
