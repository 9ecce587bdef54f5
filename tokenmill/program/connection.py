"""Connection: JSON over HTTP to a server of tokenmill, for threads that wait. In the standard library's own client:
what the package depends on has none that a program could rely on."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tokenmill.errors import InvalidRequest, TokenmillError

_BUSY = ("too_many_sessions", "rate_limit_exceeded", "concurrency_limit_exceeded")  # refused before anything was done
_ENDED = ("session_ended", "session_not_found", "state_ended")
_STALE = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)


class Connection:
    """One per thread and server, kept open between requests."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"url is {url!r}; write it like http://127.0.0.1:8000")
        self.url, self._timeout = url, timeout
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._own = threading.local()

    def ask(self, method: str, path: str, content: Any = None) -> dict[str, Any]:
        """A whole answer. Raises InvalidRequest for what the server calls wrong, and TokenmillError."""
        answer: dict[str, Any] = json.loads(self._whole(self._request(method, path, content)))
        return answer

    def stream(self, path: str, content: Any) -> Iterator[dict[str, Any]]:
        """The events of an answer as they come."""
        response, over = self._request("POST", path, content), False
        try:
            for line in response:
                if line.startswith(b"data: {"):
                    told = json.loads(line[6:])
                    if "error" in told:
                        raise _error(told)
                    yield told
                elif line.startswith(b"data: [DONE]"):
                    response.read()
                    over = True
                    return
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        finally:
            if not over:  # what is left of it would be taken for the next answer
                self.forget()
        raise self._lost("the answer broke off")

    def forget(self) -> None:
        """Close this thread's connection."""
        found, self._own.open = getattr(self._own, "open", None), None
        if found is not None:
            found.close()

    def _request(self, method: str, path: str, content: Any) -> http.client.HTTPResponse:
        body = None if content is None else json.dumps(content).encode()
        deadline = time.monotonic() + self._timeout
        while True:
            response = self._send(method, path, body)
            if response.status == 200:
                return response
            data = self._whole(response)
            try:
                told = json.loads(data)
                code = told["error"]["code"]
            except (ValueError, TypeError, KeyError):
                raise TokenmillError(f"{self.url} answered {response.status}: {data[:200]!r}") from None
            pause = float(response.headers.get("retry-after") or 1)
            if response.status != 429 or code not in _BUSY or time.monotonic() + pause > deadline:
                raise _error(told)
            time.sleep(pause)

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            self.forget()
            raise self._lost(error) from None

    def _send(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        while True:
            kept = getattr(self._own, "open", None)
            open_now = kept or self._connect()
            try:
                open_now.request(method, self._path + path, body, self._headers)
                return open_now.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.forget()
                if kept is None or not isinstance(error, _STALE):  # else the server closed what was idle for long
                    raise self._lost(error) from None

    def _connect(self) -> http.client.HTTPConnection:
        made: http.client.HTTPConnection
        if self._tls is not None:
            made = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)
        else:
            made = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        self._own.open = made
        return made

    def _lost(self, why: object) -> TokenmillError:
        return TokenmillError(f"the server at {self.url} cannot be asked: {why}; see whether it runs")


def _error(told: dict[str, Any]) -> TokenmillError:
    error = told["error"]
    wrong = error.get("type") == "invalid_request_error" and error.get("code") not in _ENDED
    return (InvalidRequest if wrong else TokenmillError)(str(error.get("message")))
