"""Who may call a listener: clients with the right token, and with a certificate of the right name.

A token that nobody knows is UNAUTHENTICATED; one that is the other listener's, or a certificate of
another name, is PERMISSION_DENIED. A connection without any certificate, where one is asked for,
does not come about.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc

from parlay.controller.seldom import Seldom
from parlay.controller.tls import ServerTls
from parlay.controller.tokens import Tokens
from parlay.protos.credentials import bearer, is_private

CALLER: ContextVar[Mapping[str, str]] = ContextVar("caller", default={})  # noqa: B039
"""Who makes the call that this task serves: `token`: its name, `certificate`: its name."""
log = logging.getLogger("parlay.controller")
Context = grpc.aio.ServicerContext[Any, Any]


class Unauthenticated(ValueError):
    """The caller did not say who it is, or not truly."""


class Denied(ValueError):
    """The caller is known, and may not do this."""


@dataclass(slots=True)
class Door:
    """How a listener is guarded; what is None or empty asks nothing.

    tokens: who may enter; others: the other listener's, to tell a wrong scope from a wrong token;
    names: a client's certificate has one of them as common or alternative name; mode: of a Unix
    socket; refused: calls so far. tls is for host:port alone.
    """

    tls: ServerTls | None = None
    tokens: Tokens | None = None
    others: Tokens | None = None
    names: frozenset[str] = frozenset()
    mode: int = 0o600
    refused: int = 0

    @property
    def asks(self) -> bool:
        """Say whether not everybody who reaches the listener may call."""
        mutual = self.tls is not None and self.tls.client_ca is not None
        return self.tokens is not None or mutual

    def check(self, target: str, what: str) -> None:
        """Raise ValueError where other hosts reach the address and nothing keeps them out."""
        if is_private(target):
            return
        if not self.asks:
            raise ValueError(
                f"{what} cannot listen on {target}: it asks for no password, so give it unix:/path"
                " or a port of 127.0.0.1, or let it ask for tokens or certificates"
            )
        if self.tls is None:
            raise ValueError(
                f"{what} cannot listen on {target}: tokens would travel as plain text, so give it"
                " tls_cert and tls_key"
            )

    def admit(self, metadata: Any, certified: Mapping[str, Any]) -> dict[str, str]:
        """Return who calls; raises Unauthenticated or Denied.

        metadata: the call's (key, value) pairs; certified: gRPC's properties of the connection.
        """
        who = {}
        if self.tokens is not None:
            token = bearer(metadata)
            if not token:
                raise Unauthenticated("a token is needed: authorization: Bearer TOKEN")
            name = self.tokens.name_of(token)
            if name is None and self.others is not None and self.others.name_of(token) is not None:
                raise Denied("this token is not for this listener")
            if name is None:
                raise Unauthenticated("the token is not known, or not any more")
            who["token"] = name
        shown = [
            value.decode("utf-8", "replace")
            for key in ("x509_common_name", "x509_subject_alternative_name")
            for value in certified.get(key, ())
        ]
        if shown:
            who["certificate"] = shown[0]
        if self.names and not self.names & set(shown):
            raise Denied(f"the certificate of {', '.join(shown) or 'nobody'} may not call here")
        return who


class Access(grpc.aio.ServerInterceptor):
    """Lets calls of every method through a door, or ends them; streams again as tokens change."""

    def __init__(self, door: Door) -> None:
        self._door, self._seldom = door, Seldom()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler behind the door."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        kind = "_".join(
            "stream" if streams else "unary"
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        serve = getattr(handler, kind)
        behind = self._stream if inspect.isasyncgenfunction(serve) else self._call
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            behind(serve, method, handler.request_streaming),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _call(self, serve: Any, method: str, streaming: bool) -> Any:
        async def behind(request: Any, context: Context) -> Any:
            await self._enter(context, method)
            return await serve(
                self._while_valid(request, context) if streaming else request, context
            )

        return behind

    def _stream(self, serve: Any, method: str, streaming: bool) -> Any:
        async def behind(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._enter(context, method)
            async for answer in serve(
                self._while_valid(request, context) if streaming else request, context
            ):
                yield answer

        return behind

    async def _enter(self, context: Context, method: str) -> None:
        try:
            CALLER.set(self._door.admit(context.invocation_metadata(), context.auth_context()))
        except (Unauthenticated, Denied) as error:
            self._say(method, context.peer(), error)
            await context.abort(code_of(error), str(error))

    async def _while_valid(self, requests: AsyncIterator[Any], context: Context) -> Any:
        """Yield a stream's requests; raises as soon as its token is taken out of the file."""
        tokens = self._door.tokens
        version = 0 if tokens is None else tokens.version
        async for request in requests:
            if tokens is not None:
                tokens.refresh()
                if tokens.version != version:
                    version = tokens.version
                    self._door.admit(context.invocation_metadata(), context.auth_context())
            yield request

    def _say(self, method: str, peer: str, error: Exception) -> None:
        self._door.refused += 1
        if self._seldom.due() is not None:
            log.warning(
                "call refused method=%s peer=%s reason=%r refused_so_far=%d",
                *(method, peer, str(error), self._door.refused),
            )


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the status of a refusal."""
    denied = isinstance(error, Denied)
    return grpc.StatusCode.PERMISSION_DENIED if denied else grpc.StatusCode.UNAUTHENTICATED
