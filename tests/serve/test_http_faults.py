"""Faults of a real server under load, seen from outside: nothing is lost, nothing stays behind, nothing goes down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server

PATH = "/v1/completions"
STREAMS = 64


@pytest.fixture
def own_server(chat_model: str) -> Iterator[Server]:
    server = Server.start(chat_model, "--hang-seconds", "2")
    yield server
    assert server.stop() == 0


def body(number: int, tokens: int = 60, **more: Any) -> dict[str, Any]:
    prompt = f"mill number {number} " * (1 + number % 4)
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.7 * (number % 2), "seed": number}
    return asked | {"ignore_eos": True, "return_token_ids": True, **more}


def engine_of(server: Server) -> int | None:
    """The process that the front has started."""
    for path in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for child in path.read_text().split():
            with contextlib.suppress(OSError):
                if b"tokenmill.serve.engine.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


async def stream(client: httpx.AsyncClient, number: int, said: list[int]) -> str | None:
    """Adds the tokens of a stream to `said` as they come; returns how it finished."""
    finish = None
    async with client.stream("POST", PATH, json=body(number, stream=True)) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            said += choice["token_ids"]
            finish = choice["finish_reason"]
    return finish


async def strike(server: Server, signals: list[signal.Signals], said: list[list[int]]) -> None:
    """Hit the engine each time the streams have come further, and wait for the next one."""
    struck: set[int] = set()
    for number in signals:
        before = sum(map(len, said))
        while sum(map(len, said)) < before + STREAMS or (engine := engine_of(server)) is None or engine in struck:
            await asyncio.sleep(0.01)
        struck.add(engine)
        os.kill(engine, number)


@pytest.mark.parametrize("signals", [[signal.SIGKILL] * 3, [signal.SIGSTOP]], ids=["three kills", "hang"])
def test_streams_go_on_over_the_death_of_the_engine(own_server: Server, signals: list[signal.Signals]) -> None:
    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=own_server.url, timeout=120, limits=limits) as client:
            asks = [client.post(PATH, json=body(number)) for number in range(STREAMS)]
            undisturbed = [answer.json()["choices"][0]["token_ids"] for answer in await asyncio.gather(*asks)]
            said: list[list[int]] = [[] for _ in range(STREAMS)]
            jobs = [asyncio.create_task(stream(client, number, said[number])) for number in range(STREAMS)]
            await strike(own_server, signals, said)
            assert await asyncio.gather(*jobs) == ["length"] * STREAMS
            assert said == undisturbed
            assert (await client.get("/health/ready")).json()["restarts"] == len(signals)

    asyncio.run(asyncio.wait_for(main(), 180))


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"tokenmill_{name} "))


def test_a_storm_of_clients_that_leave_leaves_nothing(own_server: Server) -> None:
    async def visit(number: int) -> None:
        asked = json.dumps(body(number, 1500, stream=number % 3 > 0, n=1 + number % 2)).encode()
        reader, writer = await asyncio.open_connection(*own_server.url.removeprefix("http://").split(":"))
        writer.write(b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(asked)))
        writer.write(asked)
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(reader.read(1 + 300 * (number % 5)), 0.05 * (number % 7) + 0.01)
        writer.transport.abort() if number % 2 else writer.close()

    async def main() -> None:
        for first in range(0, 300, 100):
            await asyncio.gather(*(visit(number) for number in range(first, first + 100)))

    asyncio.run(main())
    deadline = time.monotonic() + 20
    names = ("requests_active", "requests_running", "requests_queued", "queued_tokens")
    while any(metric(own_server.url, name) for name in names) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {name: metric(own_server.url, name) for name in names} == dict.fromkeys(names, 0)
    free = metric(own_server.url, "kv_blocks_free") + metric(own_server.url, "kv_blocks_cached")
    assert free == metric(own_server.url, "kv_blocks")
    assert httpx.get(f"{own_server.url}/health/ready").json()["restarts"] == 0


def test_a_full_disk_refuses_files_and_nothing_else(chat_model: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    server = Server.start(chat_model, "--journal", str(journal))
    line = json.dumps({"custom_id": "a", "method": "POST", "url": PATH, "body": {"prompt": "x", "max_tokens": 2}})
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:

            def upload() -> httpx.Response:
                return client.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"})

            first = upload()
            assert first.status_code == 200
            _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (journal.stat().st_size, hard))
            full = upload()
            assert full.status_code == 507 and full.json()["error"]["code"] == "journal_full"
            batch = {"input_file_id": first.json()["id"], "endpoint": PATH, "completion_window": "24h"}
            assert client.post("/v1/batches", json=batch).status_code == 507
            assert client.post(PATH, json={"prompt": "x", "max_tokens": 2}).status_code == 200
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            assert upload().status_code == 200
            assert len(client.get("/v1/files").json()["data"]) == 2
    finally:
        assert server.stop() == 0


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def hold(server: Server, count: int) -> None:
    """That many connections which say nothing: the server answers as before, and does nothing for them."""
    host, port = server.url.removeprefix("http://").split(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + 512, hard)), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((host, int(port))))
        with httpx.Client(base_url=server.url, timeout=60) as client:
            began = time.monotonic()
            assert client.post(PATH, json={"prompt": "x", "max_tokens": 2}).status_code == 200
            assert time.monotonic() - began < 50
            assert metric(server.url, "requests_active") == 0
        time.sleep(0.5)
        engine = engine_of(server)
        assert engine is not None
        before = cpu_seconds(server.process.pid), cpu_seconds(engine)
        time.sleep(2)
        used = cpu_seconds(server.process.pid) - before[0], cpu_seconds(engine) - before[1]
        assert max(used) < 0.1, f"an idle server used {used} s in 2 s"
        stack.enter_context(socket.create_connection((host, int(port))))  # and there is room for more


def test_idle_connections_cost_nothing(own_server: Server) -> None:
    hold(own_server, 500)


@pytest.mark.slow
def test_ten_thousand_idle_connections(chat_model: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = Server.start(chat_model)
    try:
        hold(server, min(10_000, hard - 1024))
    finally:
        assert server.stop() == 0
