"""HttpError: what a client is told when something is wrong, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GONE = 499  # nobody reads this status: the client has left


class HttpError(Exception):
    """A refusal with its status. `code` is for programs, the message for people."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after  # seconds
        self.close = close  # the connection cannot be used any further

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, -int(-self.retry_after // 1)))  # whole seconds, upwards
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.close:
            headers["connection"] = "close"
        return headers


def unsupported(message: str) -> HttpError:
    """For what is not done here; the message begins with the parameter's name."""
    return HttpError(400, message, "unsupported", message.partition(" ")[0])


Shape = Callable[[HttpError], dict[str, Any]]


def openai_shape(error: HttpError) -> dict[str, Any]:
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_shape(error: HttpError) -> dict[str, Any]:
    kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def shape_at(path: str) -> Shape:
    """The shape of the API that a path belongs to."""
    return anthropic_shape if path.startswith("/v1/messages") else openai_shape
