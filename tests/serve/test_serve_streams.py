"""64 streams at once: none is lost, none is another's, and each says what it says alone."""

from __future__ import annotations

import asyncio

from http_server import Server
from load_streams import Fate, load


def test_64_streams_say_what_each_says_alone(chat_model: str) -> None:
    server = Server.start(chat_model, "--name", "default")
    try:
        fate = asyncio.run(load(server.url, 64, 60))
        assert fate == Fate(equal=64, at_once=fate.at_once) and fate.at_once > 16  # more than run in the engine
    finally:
        assert server.stop() == 0
