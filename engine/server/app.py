"""Routes of the OpenAI-compatible server: what comes in, and who answers it.

A POST is read, checked (`schema.py`), encoded and given to the engine's thread (`worker.py`); its
tokens come back on a queue and leave as one object or as events (`answers.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from parlay.engine.server.answers import Answer, Api
from parlay.engine.server.chat import CHAT
from parlay.engine.server.completions import COMPLETIONS
from parlay.engine.server.errors import ApiError, invalid
from parlay.engine.server.fields import parse_object
from parlay.engine.server.meter import CONTENT_TYPE, Meter
from parlay.engine.server.schema import Ask, check_model
from parlay.engine.server.wire import Gone, read_body, send_events, while_there
from parlay.engine.server.worker import Job, Worker
from parlay.engine.tokenizer import Tokenizer

MAX_BODY_BYTES = 1 << 20
SHORT_BYTES = 8192
"""A body up to here is encoded on the event loop: a thread would cost more."""
CLIENT_GONE = 499
"""The status under which nginx counts a client that closed its connection."""


@dataclass(slots=True)
class Service:
    """Everything a route needs. vocab: token ids that a prompt may hold."""

    model: str
    created: int
    tokenizer: Tokenizer
    vocab: int
    worker: Worker
    meter: Meter

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route(CHAT.path, Endpoint(self, CHAT), methods=["POST"]),
                Route(COMPLETIONS.path, Endpoint(self, COMPLETIONS), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.one_model),
                Route("/metrics", self.metrics),
                Route("/health", self.health),
            ],
            exception_handlers={HTTPException: _no_route, ApiError: _refused},
        )

    async def models(self, request: Request) -> Response:
        """List the one model that is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """Describe the model if it is the one that is served."""
        name = request.path_params["name"]
        if name != self.model:
            raise ApiError(404, f"there is no model '{name[:80]}' here", "model", "model_not_found")
        return JSONResponse(self._card())

    async def metrics(self, request: Request) -> Response:
        """Serve the metrics."""
        return Response(self.meter.text(), headers={"content-type": CONTENT_TYPE})

    async def health(self, request: Request) -> Response:
        """Say whether requests are served, and how many are."""
        running = len(self.worker.engine.scheduler.running)
        body = {
            "status": "failed" if self.worker.crashed else "ok",
            "model": self.model,
            "running": running,
            "waiting": max(self.worker.in_flight - running, 0),
        }
        return JSONResponse(body, 503 if self.worker.crashed else 200)

    def _card(self) -> dict[str, object]:
        """Return the model as OpenAI describes one; max_model_len, its context, as vLLM does."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "parlay",
            "max_model_len": self.worker.engine.config.positions,
        }


class Endpoint:
    """A route that generates, as a bare ASGI application: it must see the client go away."""

    def __init__(self, service: Service, api: Api) -> None:
        self.service, self.api = service, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with a refusal where it cannot be met."""
        status = 200
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            status = error.status
            await error.response()(scope, receive, send)
        except Gone:
            status = CLIENT_GONE
        self.service.meter.answered(self.api.path, status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, worker = self.service, self.service.worker
        body = await read_body(receive, MAX_BODY_BYTES)
        ask = self.api.parse(parse_object(body), worker.engine.limits.proposer_mask)
        check_model(ask, service.model)
        if len(body) <= SHORT_BYTES:
            prompt = self.api.encode(ask, service.tokenizer)
        else:
            prompt = await asyncio.to_thread(self.api.encode, ask, service.tokenizer)
        sampling = ask.sampling_params(self._max_tokens(ask, prompt))
        job = Job(prompt, sampling, ask.speculation)
        worker.submit(job)
        try:
            answer = Answer(self.api, ask, job, service.tokenizer)
            if ask.stream:
                await while_there(receive, send_events(send, answer.events()))
            else:
                await while_there(receive, _send_whole(scope, receive, send, answer))
        finally:
            worker.release(job)

    def _max_tokens(self, ask: Ask, prompt: list[int]) -> int:
        """Return how many tokens may be generated; raises ApiError where they do not fit."""
        field, positions = self.api.prompt_field, self.service.worker.engine.config.positions
        if not prompt:
            raise invalid(f"{field} has no token", field)
        if max(prompt) >= self.service.vocab:
            raise invalid(f"{field} holds {max(prompt)}: ids end below {self.service.vocab}", field)
        room = positions - len(prompt)
        wanted = ask.max_tokens or max(room, 1)
        if wanted > room:
            raise invalid(
                f"the context holds {positions} tokens, but {field} has {len(prompt)} and up to"
                f" {wanted} are to follow: shorten {field} or lower max_tokens",
                field if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        return wanted


async def _send_whole(scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
    await JSONResponse(await answer.whole())(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path[:80]}"
    return ApiError(error.status_code, f"{path}: {error.detail}").response()
