"""Who may read the page and the metrics: whoever shows a token, where one is asked for.

Prometheus and commands show it as a bearer's; browsers ask people for it as a password, under any
name. /health answers everybody, but tells strangers no more than that it does.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Iterable
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from parlay.controller.seldom import Seldom
from parlay.controller.tokens import Tokens
from parlay.protos.credentials import MOST_TOKEN, is_private

HEALTH = "/health"
_ASK = {"www-authenticate": 'Basic realm="parlay: any name, and a token as the password"'}
_WORDS = "a token is needed: as a password under any name, or as authorization: Bearer TOKEN"
_MOST_HEADER = 4 * MOST_TOKEN
log = logging.getLogger("parlay.controller")


def check_page(address: str, tokens: Tokens | None) -> None:
    """Raise ValueError where other hosts reach the page and it asks nothing."""
    if tokens is None and not is_private(address):
        raise ValueError(
            f"the page cannot listen on {address}: it asks for no password, so give it a port of"
            " 127.0.0.1, or http_tokens"
        )


class PageDoor:
    """The ASGI application `app` behind a door; refused: requests without a known token."""

    def __init__(self, app: Any, tokens: Tokens) -> None:
        self.refused = 0
        self._app, self._tokens, self._seldom = app, tokens, Seldom()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http" or self._known(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["path"] == HEALTH:
            await JSONResponse({"status": "ok"})(scope, receive, send)
        else:
            self._say(scope)
            await _refusal(scope["path"])(scope, receive, send)

    def _known(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        for key, value in headers:
            if key == b"authorization" and len(value) <= _MOST_HEADER:
                token = token_of(value.decode("latin-1"))
                return bool(token) and self._tokens.name_of(token) is not None
        return False

    def _say(self, scope: Any) -> None:
        self.refused += 1
        if self._seldom.due() is not None:
            log.warning(
                "page refused peer=%s path=%r refused_so_far=%d",
                *((scope.get("client") or ("unknown",))[0], scope["path"], self.refused),
            )


def token_of(authorization: str) -> str:
    """Return the token that an Authorization header carries, else an empty text."""
    kind, _, rest = authorization.partition(" ")
    if kind.lower() == "bearer":
        return rest.strip()
    if kind.lower() != "basic":
        return ""
    try:
        pair = base64.b64decode(rest.strip(), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return pair.partition(":")[2]


def _refusal(path: str) -> Response:
    if path.endswith(".json"):
        return JSONResponse({"error": _WORDS}, 401, headers=_ASK)
    return PlainTextResponse(f"{_WORDS}\n", 401, headers=_ASK)
