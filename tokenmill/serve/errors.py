"""HttpError: what a client is told when something is wrong, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.errors import InvalidRequest, QueueFull, TokenmillError
from tokenmill.serve.admission import Overloaded, Unavailable
from tokenmill.serve.journal import JournalFull

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


def refusal_of(error: Exception, request_id: str) -> HttpError:
    """What to tell of an error that somebody raised."""
    match error:
        case HttpError():
            return error
        case InvalidRequest():
            return HttpError(400, str(error), *_code_and_param(str(error)))
        case Overloaded():
            return HttpError(429, str(error), error.code, retry_after=error.retry_after)
        case QueueFull():
            return HttpError(429, str(error), "overloaded", retry_after=1.0)
        case Unavailable():
            return HttpError(503, str(error), "unavailable", retry_after=error.retry_after)
        case JournalFull():
            return HttpError(507, str(error), "journal_full")
        case TokenmillError():
            return HttpError(500, str(error), "engine_error")
    return HttpError(500, f"something went wrong on the server; its log says more about {request_id}", "internal_error")


def _code_and_param(message: str) -> tuple[str, str | None]:
    if message.startswith("the prompt has "):
        return "context_length_exceeded", None
    name, _, rest = message.partition(" ")  # messages about a setting begin with its name
    return "invalid_value", name if rest.startswith(_ABOUT) and _is_name(name) else None


_ABOUT = ("is ", "has ", "contains ", "names ", "allows ", "must ", "key is ", "value is ", "entry is ")


def _is_name(word: str) -> bool:
    return word.isascii() and word.replace("_", "").isalnum() and word not in ("this", "it", "message", "structured")
