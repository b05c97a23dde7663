"""/v1/completions: a text goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parlay.engine.request import TokenLogprob
from parlay.engine.server.answers import Api, shown_logprob
from parlay.engine.server.schema import Ask, completion_ask
from parlay.engine.server.text import Entry, token_bytes
from parlay.engine.tokenizer import Tokenizer


def _encode(ask: Ask, tokenizer: Tokenizer) -> list[int]:
    if isinstance(ask.prompt, str):
        return tokenizer.encode(ask.prompt)
    return [token for token in ask.prompt if isinstance(token, int)]


def _choice(text: str, entries: Sequence[Entry] | None, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None if entries is None else _logprobs(entries, tokenizer)
    return {"text": text, "logprobs": logprobs}


def _logprobs(entries: Sequence[Entry], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": [_key(entry.data) for entry in entries],
        "token_logprobs": [shown_logprob(entry.logprob.logprob) for entry in entries],
        "top_logprobs": [_top(entry.logprob, tokenizer) for entry in entries]
        if any(entry.logprob.top for entry in entries)
        else None,
        "text_offset": [entry.offset for entry in entries],
    }


def _top(logprob: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the likeliest tokens, and the one that was drawn."""
    pairs = [*logprob.top, (logprob.token, logprob.logprob)]
    return {_key(token_bytes(tokenizer, token)): shown_logprob(value) for token, value in pairs}


def _key(data: bytes) -> str:
    """Return a token's text; part of a character is written as bytes:\\xf0, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


COMPLETIONS = Api(
    path="/v1/completions",
    prefix="cmpl",
    whole="text_completion",
    chunk="text_completion",
    prompt_field="prompt",
    opening=None,
    parse=completion_ask,
    encode=_encode,
    choice=_choice,
    delta=_choice,
)
