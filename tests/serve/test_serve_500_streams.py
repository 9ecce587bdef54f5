"""500 streams at once on the default model: none is lost, none is another's, and each says what it says alone."""

from __future__ import annotations

import asyncio

import pytest
from http_server import Server
from load_streams import Fate, load

STREAMS = 500


@pytest.mark.slow
def test_500_streams_of_the_default_model_say_what_each_says_alone(default_model: str) -> None:
    options = ("--load-format", "auto", "--dtype", "auto", "--max-num-seqs", "64", "--max-model-len", "256")
    server = Server.start(default_model, *options, "--name", "default")
    try:
        fate = asyncio.run(load(server.url, STREAMS, 16))
        assert fate == Fate(equal=STREAMS, at_once=STREAMS)
    finally:
        assert server.stop() == 0
