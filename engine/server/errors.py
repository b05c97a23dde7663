"""What the API refuses, in the shape that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

_KINDS = {404: "not_found_error", 429: "overloaded_error", 500: "server_error", 503: "server_error"}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """A refusal: an HTTP status, one line for people, and the field that it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return what is sent: {"error": {"message", "type", "param", "code"}}."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the answer; what may work later says when."""
        busy = self.status in (429, 503)
        headers: Mapping[str, str] | None = {"retry-after": str(RETRY_AFTER_S)} if busy else None
        return JSONResponse(self.body(), self.status, headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param, code)
