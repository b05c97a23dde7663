"""The target's own questions: where they stand, which are kept, and that they are asked once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.distill.tiny_target import CONFIG, tiny_weights

from parlay.engine.distill.ask import ASK_TOKENS, SHORTEST, around_question, asked
from parlay.engine.distill.generate import Decoder


def decoder() -> Decoder:
    return Decoder(CONFIG, tiny_weights(), longest=ASK_TOKENS + 4)


class Template:
    """Chats as 2, letters, 3."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [2, *self.encode(messages[0]["content"]), 3]

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 26 + 4 for c in text]


class Shouting(Template):
    """A template that changes what the user wrote."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [2, *self.encode(messages[0]["content"][::-1]), 3]


def test_a_question_stands_where_the_users_text_would() -> None:
    assert around_question(Template()) == ([2], [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ask itself"):
        around_question(Shouting())  # type: ignore[arg-type]


def test_what_it_asked_is_kept_once_and_only_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    drawn: list[int] = []

    def ask(make: object, seed: int = 1) -> list[list[int]]:
        assert callable(make)
        return asked(path, make, Template(), 200, seed, drawn.append)  # type: ignore[arg-type]

    found = ask(decoder)
    assert sum(drawn) == 200
    assert 0 < len(found) <= 200
    assert len({tuple(p) for p in found}) == len(found)
    for prompt in found:
        assert (prompt[0], prompt[-1]) == (2, 3)
        assert SHORTEST <= len(prompt) - 2 < ASK_TOKENS
        assert 1 not in prompt  # the end token
    assert ask(lambda: pytest.fail("asked twice")) == found
    path.write_text("no json", encoding="utf-8")
    with pytest.raises(ValueError, match="damaged"):
        ask(decoder)
