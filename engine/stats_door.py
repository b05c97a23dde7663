"""Who may watch an engine: callers with a token of a file, whichever method they call."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from parlay.protos.credentials import bearer, is_private, read_tokens

log = logging.getLogger("parlay.stats")


def check_reach(address: str) -> None:
    """Raise ValueError where other hosts reach an address: what they would send is plain text."""
    if not is_private(address):
        raise ValueError(
            f"stats cannot be served at {address}: other hosts reach it, and nothing there is"
            " encrypted; give unix:/path or a port of 127.0.0.1"
        )


class StatsDoor(grpc.aio.ServerInterceptor):
    """Ends calls whose token is not in the file, which is read for each: replacing it rotates it.

    others: a file of tokens for another service, whose callers are told that they are wrong here.
    Raises OSError or ValueError where `tokens` has none to begin with.
    """

    def __init__(self, tokens: Path, others: Path | None = None) -> None:
        read_tokens(tokens)
        self._tokens, self._others = tokens, others

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, or one of the same kind that refuses."""
        handler = await continuation(handler_call_details)
        refusal = self._refusal(bearer(handler_call_details.invocation_metadata))
        if handler is None or refusal is None:
            return handler
        code, text = refusal

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(code, text)

        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        return getattr(grpc, f"{kind}_rpc_method_handler")(refuse)

    def _refusal(self, token: str) -> tuple[grpc.StatusCode, str] | None:
        """Return the status and the reason that a call with this token ends with; None: enter."""
        if not token:
            text = "a token is needed: authorization: Bearer TOKEN"
            return grpc.StatusCode.UNAUTHENTICATED, text
        if _holds(self._tokens, token):
            return None
        if self._others is not None and _holds(self._others, token):
            return grpc.StatusCode.PERMISSION_DENIED, "this token is not for stats"
        return grpc.StatusCode.UNAUTHENTICATED, "the token is not known, or not any more"


def _holds(path: Path, token: str) -> bool:
    """Say whether a file has a token; one that cannot be read has none."""
    try:
        known = [one for _, one in read_tokens(path)]
    except (OSError, ValueError) as error:
        log.error("tokens cannot be read error=%r", str(error))
        return False
    # Looks at all, so that how long it takes tells nothing.
    return sum(hmac.compare_digest(one.encode(), token.encode()) for one in known) > 0
