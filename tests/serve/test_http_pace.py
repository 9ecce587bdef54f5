"""Tokens leave the server one by one, at the pace at which the engine makes them."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from http_server import http_around, simulated
from sim_service import eventually, make, run

from tokenmill.serve.engine_client.events import Event, StepEvent
from tokenmill.serve.http.protocol import GuardedProtocol
from tokenmill.serve.server import listen

STEP = 0.02  # seconds per token: less than a client waits before it acknowledges (40 ms)
ANSWERS, TOKENS = 16, 6


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_accepted_connection_does_not_wait_for_acknowledgements(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    made: list[asyncio.Transport] = []
    original = GuardedProtocol.connection_made

    def noted(self: GuardedProtocol, transport: asyncio.Transport) -> None:
        made.append(transport)
        original(self, transport)

    monkeypatch.setattr(GuardedProtocol, "connection_made", noted)

    async def scenario() -> None:
        async with http_around(make(), host=host) as url:
            _, writer = await asyncio.open_connection(host, int(url.rpartition(":")[2]))
            await eventually(lambda: made)
            accepted = made[0].get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()

    run(scenario())


def test_events_arrive_one_by_one_when_the_engine_makes_them() -> None:
    """Many answers one after the other over one connection, as clients that keep theirs ask: the kernel takes it for an
    interactive one then, and acknowledges the head of an answer late. Medians, because a busy machine delays single
    ones."""
    made: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, StepEvent):
            made.extend([event.at] * event.tokens)

    async def scenario() -> list[Heard]:
        async with simulated({"step": STEP}) as (service, url):
            service.subscribe(note)
            return await read_streams(url)

    heard = run(scenario())
    arrived = [moment for one in heard for moment in one.arrived]
    assert len(made) == len(arrived) == ANSWERS * TOKENS
    late = [there - then for then, there in zip(made, arrived)]
    for place in range(TOKENS):
        held = statistics.median(late[place::TOKENS])
        assert held < STEP / 2, f"token {place} is on its way for {held * 1e3:.1f} ms or more in half of the answers"
    alone = sum(count == 1 for one in heard for count in one.together)
    assert alone > 0.7 * len(arrived), f"only {alone} of {len(arrived)} tokens came alone"


@dataclass
class Heard:
    """One answer: when each of its tokens came, and how many came at once."""

    arrived: list[float] = field(default_factory=list)
    together: list[int] = field(default_factory=list)


async def read_streams(url: str) -> list[Heard]:
    clock, where = asyncio.get_running_loop(), urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    asked = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked | {"return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
    answers = []
    for _ in range(ANSWERS):
        writer.write(head.encode() + body)
        answers.append(heard := Heard())
        piece = b""
        while not piece.endswith(b"0\r\n\r\n"):
            piece = await reader.read(1 << 16)
            assert piece, "the server left"
            if new := piece.count(b'"token_ids":['):
                heard.arrived += [clock.time()] * new
                heard.together.append(new)
    writer.close()
    return answers


def _has_ipv6() -> bool:
    try:
        listen("::1", 0).close()
    except Exception:
        return False
    return True
