"""/v1/chat/completions: the model's turn in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parlay.engine.server.answers import Api, shown_logprob
from parlay.engine.server.errors import invalid
from parlay.engine.server.schema import Ask, chat_ask
from parlay.engine.server.text import Entry, token_bytes
from parlay.engine.tokenizer import Tokenizer


def _encode(ask: Ask, tokenizer: Tokenizer) -> list[int]:
    messages = [m for m in ask.prompt if isinstance(m, dict)]
    try:
        return tokenizer.chat(messages)
    except ValueError as error:
        raise invalid(str(error), "messages") from None


def _choice(text: str, entries: Sequence[Entry] | None, tokenizer: Tokenizer) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"message": message, "logprobs": _logprobs(entries, tokenizer)}


def _delta(text: str, entries: Sequence[Entry] | None, tokenizer: Tokenizer) -> dict[str, Any]:
    delta = {"content": text} if text else {}
    return {"delta": delta, "logprobs": _logprobs(entries, tokenizer) if entries else None}


def _logprobs(entries: Sequence[Entry] | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if entries is None:
        return None
    content = [
        _token(e.data, e.logprob.logprob)
        | {"top_logprobs": [_token(token_bytes(tokenizer, t), value) for t, value in e.logprob.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    text = data.decode(errors="replace")
    return {"token": text, "logprob": shown_logprob(logprob), "bytes": list(data)}


CHAT = Api(
    path="/v1/chat/completions",
    prefix="chatcmpl",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    prompt_field="messages",
    opening={"delta": {"role": "assistant", "content": ""}, "logprobs": None},
    parse=chat_ask,
    encode=_encode,
    choice=_choice,
    delta=_delta,
)
