"""A stream that breaks at any byte goes on elsewhere as if nothing had been: every API, tools, log-probabilities."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cluster import client, routed
from http_server import Server
from sim_service import run
from stream_cases import CASES, events


class Cutter:
    """Stands before a server and breaks off some of its answers, after any number of bytes."""

    def __init__(self, url: str, seed: int, cuts: int) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self._random = random.Random(seed)
        self.left = cuts
        self.made = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        first = await reader.read(1 << 16)
        back.write(first)
        most = 1 << 40
        if self.left and first.startswith(b"POST") and b'"probe":true' not in first:
            self.left -= 1
            anywhere = [0, 300, self._random.randrange(300, 6000), self._random.randrange(300, 30_000)]
            # The first one early: an answer that is over cannot be broken off.
            most = self._random.choice(anywhere) if self.made else self._random.randrange(250, 1000)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, most: int) -> None:
            while data := await source.read(1 << 16):
                sink.write(data[:most])
                most -= len(data)
                if most < 0:
                    self.made += 1
                    break

        ways = [asyncio.create_task(copy(there, writer, most)), asyncio.create_task(copy(reader, back, 1 << 40))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.close()
        back.close()


@asynccontextmanager
async def torn(server: Server, seed: int, cuts: int = 6) -> AsyncIterator[tuple[list[Cutter], str]]:
    """A router before two ways to one server, both of which break."""
    cutters = [Cutter(server.url, seed + number, cuts) for number in range(2)]
    doors = [await asyncio.start_server(one.serve, "127.0.0.1", 0) for one in cutters]
    try:
        urls = [f"http://127.0.0.1:{door.sockets[0].getsockname()[1]}" for door in doors]
        async with routed(urls) as (_, url):
            yield cutters, url
    finally:
        for door in doors:
            door.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 13))])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_that_breaks_anywhere_says_what_one_that_does_not_says(case: str, seed: int, server: Server) -> None:
    path, body, read = CASES[case]

    async def main() -> None:
        async with client() as http, torn(server, seed) as (cutters, url):
            whole = read(await events(http, server.url, path, body))
            assert read(await events(http, url, path, body)) == whole
            assert any(one.made for one in cutters)

    run(main())


def test_what_a_router_says_of_a_stream_must_be_possible(server: Server) -> None:
    """Tokens that the model has not, more of them than asked for, and what is no route at all."""

    async def main() -> None:
        body = json.dumps({"prompt": "The mill", "max_tokens": 3}).encode()
        async with client() as http:

            async def ask(route: dict[str, Any], state: bytes = b"") -> tuple[int, str]:
                header = {"x-tokenmill-route": json.dumps(route | {"state": len(state)})}
                answer = await http.post(f"{server.url}/v1/completions", content=state + body, headers=header)
                return answer.status_code, answer.text

            fine = {"id": "a" * 32, "created": 1, "seed": 2}
            assert (await ask(fine))[0] == 200
            for route, state in (
                ({"id": "a/b", "created": 1, "seed": 2}, b""),
                ({"id": "a", "created": 1, "seed": -2}, b""),
                ({"id": "a"}, b""),
                (fine, b"not json"),
                (fine, json.dumps({"started": True, "sequences": {"0": [[99999], None, None]}}).encode()),
                (fine, json.dumps({"started": True, "sequences": {"0": [[5] * 4, None, None]}}).encode()),
                (fine, json.dumps({"started": True, "sequences": {"0": [[5], None, "magic"]}}).encode()),
            ):
                status, text = await ask(route, state)
                assert status == 400, (route, state, text)
            state = json.dumps({"started": True, "sequences": {"0": [[70, 71], None, None]}}).encode()
            status, text = await ask(fine | {"id": "b" * 32}, state)
            assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 3

    run(main())
