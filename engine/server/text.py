"""A request's tokens as text that can be sent: whole characters, no stop string, with logprobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from parlay.engine.generate import StopText
from parlay.engine.request import TokenLogprob
from parlay.engine.tokenizer import StreamDecoder, Tokenizer

_REPLACEMENT = "\ufffd"


@dataclass(slots=True)
class Entry:
    """A token's logprob: its bytes, and the character of the output's text that it begins at."""

    logprob: TokenLogprob
    data: bytes
    offset: int


@dataclass(slots=True)
class Piece:
    """Text to send, and the entries of tokens that begin in it."""

    text: str = ""
    entries: list[Entry] = field(default_factory=list)

    def add(self, later: Piece) -> None:
        """Append what comes after."""
        self.text += later.text
        self.entries += later.entries


class OutputText:
    """Turns the tokens of one request into pieces as they come.

    A token's entry leaves with the text that it begins in, so those of a stop string never do. What
    is sent does not depend on how many tokens come at once.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopText(stop, self._pass)
        self._piece = Piece()
        self._waiting: deque[Entry] = deque()
        self._decoded_chars = self._passed_chars = 0

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Piece:
        """Take new tokens, and their logprobs where asked for; return what may be sent."""
        for n, token in enumerate(tokens):
            if logprobs and token not in self._tokenizer.eos_ids:
                data = token_bytes(self._tokenizer, token)
                self._waiting.append(Entry(logprobs[n], data, self._decoded_chars))
            self._add(self._decoder.push([token]))
        return self._take()

    def finish(self) -> Piece:
        """Return the rest: no more tokens come."""
        self._add(self._decoder.flush())
        self._stops.flush()
        piece = self._take()
        if not self._stops.ended:
            piece.entries += self._waiting
        return piece

    def _add(self, text: str) -> None:
        self._decoded_chars += len(text)
        self._stops.push(text)

    def _pass(self, text: str) -> None:
        self._piece.text += text
        self._passed_chars += len(text)

    def _take(self) -> Piece:
        piece, self._piece = self._piece, Piece()
        while self._waiting and self._waiting[0].offset < self._passed_chars:
            piece.entries.append(self._waiting.popleft())
        return piece


@lru_cache(1 << 16)
def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of one token: part of a character for some; none for a special token."""
    text = tokenizer.decode([token])
    if _REPLACEMENT not in text:
        return text.encode()
    piece = tokenizer.piece(token)
    if len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    letters = _byte_letters()
    if all(c in letters for c in piece):
        return bytes(letters[c] for c in piece)
    return text.encode()


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, the others for letters from U+0100 on (GPT-2's vocabulary,
    Radford et al. 2019).
    """
    letters = {chr(b): b for b in _printable()}
    rest = (b for b in range(256) if b not in letters.values())
    return letters | {chr(256 + n): b for n, b in enumerate(rest)}


def _printable() -> Iterator[int]:
    yield from range(ord("!"), ord("~") + 1)
    yield from range(0xA1, 0xAC + 1)
    yield from range(0xAE, 0xFF + 1)
