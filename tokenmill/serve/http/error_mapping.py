"""Which HttpError a client is told when something raised another error."""

from __future__ import annotations

from tokenmill.errors import InvalidRequest, QueueFull, TokenmillError
from tokenmill.serve.engine_client.admission import Overloaded, Unavailable
from tokenmill.serve.errors import HttpError
from tokenmill.serve.storage.journal import JournalFull


def http_error_of(error: Exception, request_id: str) -> HttpError:
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
    is_name = name.isascii() and name.replace("_", "").isalnum() and name not in _NO_NAMES
    return "invalid_value", name if is_name and rest.startswith(_ABOUT) else None


_ABOUT = ("is ", "has ", "contains ", "names ", "allows ", "must ", "key is ", "value is ", "entry is ")
_NO_NAMES = ("this", "it", "there", "message", "structured")
