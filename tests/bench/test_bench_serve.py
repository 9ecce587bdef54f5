"""The load test of servers: what it counts, what it finds wrong, and what it makes of a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenmill.bench.figures import Run, of_point
from tokenmill.bench.serve import Check, Load, alone, compare, drive
from tokenmill.bench.serve_client import ServerAddress, run
from tokenmill.bench.serve_offline import Overhead
from tokenmill.bench.table import lines
from tokenmill.bench.workloads import Ask
from tokenmill.cli.app import app
from tokenmill.errors import ConfigError, TokenmillError

Reply = Callable[[int, str, asyncio.StreamWriter], Awaitable[None]]  # number of the request, its prompt


def load(count: int, streams: int, **more: Any) -> Load:
    return Load([Ask(f"prompt {number}", 8) for number in range(count)], streams, **more)


def event(content: Any) -> bytes:
    data = b"data: %b\n\n" % (content if isinstance(content, bytes) else json.dumps(content).encode())
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


async def say(writer: asyncio.StreamWriter, text: str, pause: float = 0.0) -> None:
    """An answer in three pieces, cut in the middle of a chunk."""
    whole = HEAD + chunk(text[:1]) + chunk(text[1:]) + chunk("", "length")
    whole += event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}) + event(b"[DONE]") + END
    for part in (whole[:200], whole[200:260], whole[260:]):
        writer.write(part)
        await asyncio.sleep(pause)


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[ServerAddress]:
    count = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                asked = json.loads(await reader.readexactly(length))
                assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n") and asked["stream"]
                count += 1
                await reply(count - 1, asked["prompt"], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield ServerAddress(f"http://127.0.0.1:{port}/v1")
    finally:
        server.close()


def test_answers_are_put_together_and_timed() -> None:
    async def reply(number: int, prompt: str, writer: asyncio.StreamWriter) -> None:
        await say(writer, "mill", 0.05)

    async def main() -> Run:
        async with serving(reply) as place:
            return await drive(place, load(3, 1))

    result = run(main())
    assert [answer.text for answer in result.answers] == ["mill"] * 3 and not result.errors
    assert all((one.finish, one.prompt_tokens, one.output_tokens) == ("length", 4, 2) for one in result.answers)
    for answer in result.answers:
        assert len(answer.times) == 2 and 0 < answer.times[0] < answer.times[1] < answer.seconds
        assert answer.times[1] - answer.times[0] > 0.03 and answer.seconds >= 0.1
    assert result.output_tokens == 6 and result.seconds >= 0.3


def test_every_way_to_fail_has_its_name() -> None:
    async def reply(number: int, prompt: str, writer: asyncio.StreamWriter) -> None:
        if number == 0:
            await say(writer, "mill")
        elif number == 1:
            error = b'{"error": {"message": "come back later", "code": "overloaded"}}'
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n%b" % (len(error), error))
        elif number == 2:
            writer.write(HEAD + chunk("mi"))
            await writer.drain()
            writer.close()
        elif number == 3:
            writer.write(HEAD + chunk("mi") + event({"error": {"message": "it broke", "code": "engine_error"}}) + END)
        elif number == 4:
            writer.write(HEAD + chunk("mi") + END)  # no finish_reason, no [DONE]
        else:
            await asyncio.sleep(5)

    async def main() -> Run:
        async with serving(reply) as place:
            return await drive(place, load(6, 1, timeout=2))

    result = run(main())
    kinds = [None, "status 429", "disconnected", "engine_error", "no end", "timeout"]
    assert [one.error for one in result.answers] == kinds
    assert result.answers[1].message == "come back later" and result.answers[3].message == "it broke"
    told = of_point([result])
    assert told["completed"] == told["timed_out"] == 1 and sum(told["errors"].values()) == 5
    assert any("1 x status 429" in line for line in lines(told, "1 stream"))


def test_a_server_that_is_not_there_is_an_error_of_its_own() -> None:
    result = run(drive(ServerAddress("http://127.0.0.1:9"), load(2, 2)))
    assert result.errors == {"connect": 2}


def test_an_open_loop_waits_for_nobody_and_counts_from_when_a_request_was_due() -> None:
    now_open, most = 0, 0

    async def reply(number: int, prompt: str, writer: asyncio.StreamWriter) -> None:
        nonlocal now_open, most
        now_open += 1
        most = max(most, now_open)
        await asyncio.sleep(0.3)
        now_open -= 1
        await say(writer, "mill")

    async def main() -> Run:
        async with serving(reply) as place:
            asks = [Ask("prompt", 8, at=0.02 * number) for number in range(6)]
            driven = asyncio.create_task(drive(place, Load(asks, 1)))
            await asyncio.sleep(0.01)
            time.sleep(0.15)  # the client is held up: requests that are due meanwhile are sent late
            return await driven

    result = run(main())
    assert most == 6 and not result.errors
    due = [0.02 * number for number in range(6)]
    assert [answer.start for answer in result.answers] == pytest.approx(due, abs=1e-6)
    late = [answer.late for answer in result.answers]
    assert late[1] > 0.1 and late[5] < late[1], "the hold-up is told: less of it to those that were due later"
    for answer in result.answers:
        assert answer.times[0] >= 0.3 + answer.late, "and counted"


def test_who_watches_is_told_how_far_it_is() -> None:
    async def reply(number: int, prompt: str, writer: asyncio.StreamWriter) -> None:
        await say(writer, "mill", 0.1)

    told: list[tuple[int, int, float]] = []

    async def main() -> None:
        async with serving(reply) as place:
            await drive(place, load(4, 1), lambda *what: told.append(what))

    run(main())
    assert told and all(total == 4 for _, total, _ in told)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told) and told[-1][0] >= 2
    assert any(speed > 0 for _, _, speed in told)


def test_streams_are_open_at_once_and_not_more() -> None:
    now_open, most = 0, 0

    async def reply(number: int, prompt: str, writer: asyncio.StreamWriter) -> None:
        nonlocal now_open, most
        now_open += 1
        most = max(most, now_open)
        await asyncio.sleep(0.03)
        now_open -= 1
        await say(writer, "mill")

    async def main() -> Run:
        async with serving(reply) as place:
            return await drive(place, load(20, 5))

    assert not run(main()).errors and most == 5


def test_the_check_finds_what_is_wrong() -> None:
    asked = load(5, 5)
    right = {ask.prompt: f"answer {number}" for number, ask in enumerate(asked.asks)}
    loaded = False

    async def reply(number: int, prompt: str, writer: asyncio.StreamWriter) -> None:
        which = list(right).index(prompt)
        if not loaded or which in (0, 4):
            await say(writer, right[prompt])
        elif which == 1:
            writer.close()
        else:
            await say(writer, "answer 0" if which == 2 else "nonsense")

    async def main() -> Check:
        nonlocal loaded
        async with serving(reply) as place:
            expected = await alone(place, asked)
            assert expected == list(right.values())
            loaded = True
            return compare((await drive(place, asked)).answers, expected)

    assert run(main()) == Check(equal=2, lost=1, mixed_up=1, different=1)


def test_a_failure_alone_is_told() -> None:
    async def reply(number: int, prompt: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\n{}")

    async def main() -> None:
        async with serving(reply) as place:
            await alone(place, load(1, 1))

    with pytest.raises(TokenmillError, match="status 401"):
        run(main())


def test_what_http_costs_is_told_by_rounds() -> None:
    found = Overhead([95.0, 50.0, 99.0], [100.0, 100.0, 100.0], [])
    assert found.percent == pytest.approx([5.0, 50.0, 1.0]) and found.median == pytest.approx(5.0)
    told = [line.split() for line in found.lines()]
    assert told[-2:] == [["median", "95.0", "100.0", "5.0", "%"], ["best", "99.0", "100.0", "1.0", "%"]]


def test_wrong_use_is_told() -> None:
    for words, said in (
        (["--url", "ftp://x"], "--url is 'ftp://x'"),
        (["--url", "http://x", "--against-offline"], "--against-offline"),
        (["--key", "x"], "--url"),
        (["--url", "http://x", "--rate", "2,x"], "--rate is '2,x'"),
        (["--url", "http://x", "--rate", "0"], "--rate is '0'"),
        (["--url", "http://x", "--speed", "2"], "--trace"),
        (["--url", "http://x", "--slo", "ttft=fast"], "ttft=fast"),
        (["--url", "http://x", "--price", "cheap"], "--price is 'cheap'"),
        (["--url", "http://x", "--burstiness", "4"], "--rate"),
        (["--url", "http://x", "--json", "/no/such/folder/x.json"], "cannot be written"),
        (["--url", "http://x", "--longest-input", "9"], "--trace"),
        (["--url", "http://x", "--rate", "2", "--streams", "2"], "--rate at times of its own; give one of them"),
        (["--url", "http://x", "--trace", "t", "--speed", "2", "--streams", "2"], "--speed at times of its own"),
    ):
        result = CliRunner().invoke(app, ["bench", "serve", *words])
        assert result.exit_code == 2 and said in result.output
    with pytest.raises(ConfigError):
        ServerAddress("127.0.0.1:8000")
