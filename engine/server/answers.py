"""Answers of both endpoints: one object, or a stream of server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parlay.engine.request import FinishReason, Request
from parlay.engine.server.errors import ApiError
from parlay.engine.server.schema import Ask
from parlay.engine.server.text import Entry, OutputText, Piece
from parlay.engine.server.worker import Job
from parlay.engine.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""JSON has no -inf; OpenAI's clients know this number for it."""
Choice = Callable[[str, Sequence[Entry] | None, Tokenizer], dict[str, Any]]


@dataclass(slots=True, frozen=True)
class Api:
    """What sets an endpoint apart: names, how its body is read and its choice written.

    opening: the choice that a stream begins with, if any. choice and delta: text, entries (None:
    no logprobs asked for) and tokenizer to a choice, of the whole and of a chunk.
    """

    path: str
    prefix: str
    whole: str
    chunk: str
    prompt_field: str
    opening: dict[str, Any] | None
    parse: Callable[[dict[str, Any], int], Ask]
    encode: Callable[[Ask, Tokenizer], list[int]]
    choice: Choice
    delta: Choice


@dataclass(slots=True)
class Answer:
    """One request's answer in the making."""

    api: Api
    ask: Ask
    job: Job
    tokenizer: Tokenizer
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Wait for the end; return the answer. Raises ApiError."""
        pieces = [piece async for piece in self._pieces()]
        entries = [entry for piece in pieces for entry in piece.entries]
        choice = self.api.choice(
            "".join(piece.text for piece in pieces), self._asked(entries), self.tokenizer
        )
        done = self._envelope(self.api.whole, self._choices(choice, _reason(self.job)))
        return done | {"usage": usage(self.job.request)}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events as tokens come; an error is the last but [DONE]."""
        try:
            if self.api.opening is not None:
                yield self._chunk(self._choices(self.api.opening, None))
            async for piece in self._pieces():
                if piece.text or piece.entries:
                    delta = self.api.delta(piece.text, self._asked(piece.entries), self.tokenizer)
                    yield self._chunk(self._choices(delta, None))
            last = self.api.delta("", None, self.tokenizer)
            ending = self._chunk(self._choices(last, _reason(self.job)))
            if self.ask.include_usage:
                ending += self._chunk([], usage(self.job.request))
        except ApiError as error:
            ending = _event(error.body())
        yield ending + b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Yield what can be sent, all that has come at once: a slow client gets longer pieces."""
        text = OutputText(self.tokenizer, self.job.sampling.stop)
        last = False
        while not last:
            batches = [await self.job.batches.get()]
            while not self.job.batches.empty():
                batches.append(self.job.batches.get_nowait())
            piece = Piece()
            for batch in batches:
                if isinstance(batch, ApiError):
                    raise batch
                piece.add(text.push(batch.tokens, batch.logprobs))
                last = batch.last
            if last:
                piece.add(text.finish())
            yield piece

    def _asked(self, entries: list[Entry]) -> list[Entry] | None:
        return None if self.ask.top_logprobs is None else entries

    def _choices(self, choice: dict[str, Any], reason: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, **choice, "finish_reason": reason}]

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.api.prefix}-{self.answer_id}",
            "object": kind,
            "created": self.created,
            "model": self.ask.model,
            "choices": choices,
        }

    def _chunk(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        chunk = self._envelope(self.api.chunk, choices)
        return _event(chunk | {"usage": used} if self.ask.include_usage else chunk)


def usage(request: Request | None) -> dict[str, Any]:
    """Return a request's tokens and what speculation did for it.

    mean_acceptance_length: accepted tokens a step, and the target's own one. lossy: the request
    asked for it, and its output may be other than the model's.
    """
    assert request is not None, "an answer without a request"
    steps = request.steps
    return {
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": request.output_tokens,
        "total_tokens": len(request.tokens),
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        "speculation": {
            "steps": steps,
            "drafted": request.drafted,
            "accepted": request.accepted,
            "mean_acceptance_length": round(1 + request.accepted / steps, 4) if steps else None,
            "lossy": request.speculation.lossy,
        },
    }


def shown_logprob(value: float) -> float:
    """Return a logprob as JSON can hold it."""
    return max(value, _LEAST_LOGPROB)


def _reason(job: Job) -> str:
    reason = job.request.finish_reason if job.request is not None else None
    return (reason or FinishReason.ABORT).value


def _event(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
