"""Orders: what an engine, its fork server and its ranks tell each other besides steps: JSON and open files."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 24
_MOST_FILES = 96  # as many ranks as there may be, and some more

Order = dict[str, Any]


def send_order(to: socket.socket, order: Order, files: Sequence[int] = ()) -> None:
    """Raises OSError where nobody is there any more."""
    text = json.dumps(order).encode()
    data = _LENGTH.pack(len(text)) + text
    sent = socket.send_fds(to, [data], files) if files else to.send(data)
    to.sendall(data[sent:])


def receive_order(source: socket.socket) -> tuple[Order, list[int]] | None:
    """The next order and the files that came with it; None when whoever gave orders is gone."""
    head, files = b"", []
    try:
        while len(head) < _LENGTH.size:
            more, fresh, _, _ = socket.recv_fds(source, _LENGTH.size - len(head), _MOST_FILES)
            files += fresh
            if not more:
                raise EOFError
            head += more
        (length,) = _LENGTH.unpack(head)
        text = b""
        while len(text) < length <= _LONGEST:
            part = source.recv(min(length - len(text), 1 << 16))
            if not part:
                raise EOFError
            text += part
        return json.loads(text), files
    except (OSError, EOFError, ValueError):
        for file in files:
            os.close(file)
        return None
