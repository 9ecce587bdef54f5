"""Structured logs: one JSON object per line, or plain lines for a person at a terminal.

One line per request, without a word of its prompt or its answer unless that was asked for. Whatever a client sends, a
line stays a line: nobody can write a second one, or colours and commands into the terminal of whoever reads it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LONGEST_PATH = 200  # characters of a path that is nobody's but the client's
_USUAL = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message", "taskName"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)  # ASCII only: line separators and control characters have many forms


class PlainLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        more = "".join(f" {name}={value}" for name, value in _extra(record).items())
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} "
        line += "".join(one if one.isprintable() else repr(one)[1:-1] for one in record.getMessage() + more)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logs(format: str, level: str) -> None:
    """Send what the server and its libraries say to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else PlainLines())
    libraries = (("uvicorn", "WARNING"), ("asyncio", "ERROR"), ("opentelemetry", "WARNING"))
    for name, least in (("tokenmill", level.upper()), *libraries):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _USUAL}
