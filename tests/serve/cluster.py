"""Replicas in processes of their own behind a router, and clients that check every token of their streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import sim_service

from tokenmill.params import SamplingParams
from tokenmill.serve.http.listening import QuietServer, listen
from tokenmill.serve.http.routed import PROTOCOL
from tokenmill.serve.router.app import RouterApp
from tokenmill.serve.router.settings import RouterSettings
from tokenmill.serve.settings import HttpSettings

PATIENCE = 120.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class SimReplica:
    """One that can be killed, and started again at the same address."""

    plan: dict[str, Any] = field(default_factory=dict)
    http: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        given = {"plan": self.plan, "http": {"port": self.port, **self.http}, "settings": self.settings}
        script = str(Path(__file__).with_name("sim_replica.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(given)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE)

    def engine(self) -> int | None:
        """The process that computes, if there is one now."""
        assert self.process is not None
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def kill_engine(self) -> None:
        if (engine := self.engine()) is not None:
            os.kill(engine, signal.SIGKILL)


@asynccontextmanager
async def replicas(count: int, plan: dict[str, Any] | None = None, **http: Any) -> AsyncIterator[list[SimReplica]]:
    found = [SimReplica(plan or {}, http) for _ in range(count)]
    for one in found:
        one.start()
    try:
        yield found
    finally:
        for one in found:
            one.end()


@asynccontextmanager
async def routed(
    urls: Sequence[str], ready: int | None = None, http: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[RouterApp, str]]:
    """A router before these, once so many are ready (all); and its address."""
    inner = HttpSettings(port=0, **http or {})
    sock = listen(inner.host, 0)
    app = RouterApp(RouterSettings(tuple(urls), inner, **settings))
    server = QuietServer(app, inner)
    app.fleet.start()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        wanted = len(urls) if ready is None else ready
        await sim_service.eventually(lambda: sum(one.open for one in app.fleet.replicas) >= wanted, PATIENCE)
        yield app, f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await app.fleet.stop()
        await server.end(serving)


@dataclass
class Told:
    """What a client saw of one stream."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    done: bool = False
    error: Any = None
    ids: set[str] = field(default_factory=set)
    gap: float = 0.0  # the longest between two chunks
    last: str = ""  # the id of the last event
    connections: int = 1


async def completion(client: httpx.AsyncClient, url: str, prompt: list[int], **more: Any) -> Told:
    """One streamed completion of the simulated model, by its token ids."""
    told = Told()
    body = {"prompt": prompt, "stream": True, "return_token_ids": True, "ignore_eos": True, **more}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            told.error = json.loads(await response.aread())
            return told
        last = time.monotonic()
        async for line in response.aiter_lines():
            now = time.monotonic()
            told.gap, last = max(told.gap, now - last), now
            if not line.startswith("data: "):
                assert not line or line.startswith("id: ") or line == ": still here", line
                continue
            if line == "data: [DONE]":
                told.done = True
                continue
            assert not told.done
            chunk = json.loads(line[6:])
            if "error" in chunk:
                told.error = chunk["error"]
                continue
            told.ids.add(chunk["id"])
            for choice in chunk["choices"]:
                told.tokens += choice.get("token_ids") or []
                told.finish = choice["finish_reason"] or told.finish
    return told


async def continued(
    client: httpx.AsyncClient,
    urls: Sequence[str],
    prompt: list[int],
    told: Told | None = None,
    once: bool = False,
    **more: Any,
) -> Told:
    """The same by a client that comes back with the id of its last event until all is there (or only `once`), at one
    router after the other, as browsers do. `told` is filled while the stream comes."""
    told = told if told is not None else Told()
    body = {"prompt": prompt, "stream": True, "return_token_ids": True, "ignore_eos": True, **more}
    at = -1
    while not told.done and told.error is None:
        at += 1
        headers = {"last-event-id": told.last} if told.last else {}
        try:
            url = f"{urls[at % len(urls)]}/v1/completions"
            async with client.stream("POST", url, json=body, headers=headers) as response:
                if response.status_code in (502, 503):
                    await asyncio.sleep(0.05)
                    continue
                if response.status_code != 200:
                    told.error = json.loads(await response.aread())
                    break
                data = b""
                async for part in response.aiter_raw():
                    *events, data = (data + part).split(b"\n\n")
                    for one in events:
                        _take(told, one.decode())
        except httpx.TransportError:
            await asyncio.sleep(0.05)
        told.connections = at + 1
        if once:
            break
    return told


def _take(told: Told, event: str) -> None:
    fields = dict(line.split(": ", 1) for line in event.split("\n") if not line.startswith(":"))
    assert not told.done and "id" in fields, event
    told.last = fields["id"]
    if fields["data"] == "[DONE]":
        told.done = True
        return
    chunk = json.loads(fields["data"])
    told.ids.add(chunk["id"])
    for choice in chunk["choices"]:
        told.tokens += choice.get("token_ids") or []
        told.finish = choice["finish_reason"] or told.finish


def expected(prompt: list[int], max_tokens: int, seed: int, temperature: float = 1.0) -> list[int]:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return sim_service.solo(prompt, params)


def client(**more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None), trust_env=False, **more)


@dataclass
class FakeReplica:
    """A server that tells events and answers as it is told to, in this process."""

    status: dict[str, Any] = field(default_factory=dict)  # over what a replica says of itself
    events: list[list[dict[str, Any]]] = field(default_factory=list)  # for one follower after the other
    answer: tuple[int, dict[str, str], Any] = (200, {}, {})
    asked: list[str] = field(default_factory=list)
    followers: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path != "/cluster/events":
            while (await receive()).get("more_body"):
                pass
            self.asked.append(path)
            status, headers, body = self.answer
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": raw})
            await send({"type": "http.response.body", "body": json.dumps(body).encode()})
            return
        about = {"protocol": PROTOCOL, "version": "0", "ready": True, "state": "ready", "active": 0, "queued": 0}
        about |= {"ahead": 0.0, "seconds_per_token": 1e-4, "model": "fake", "same": "x", "block_size": 16}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        told = self.events[self.followers] if self.followers < len(self.events) else []
        self.followers += 1
        for one in [about | self.status, *told]:
            line = b"data: %b\n\n" % json.dumps(one).encode()
            await send({"type": "http.response.body", "body": line, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass


@asynccontextmanager
async def fakes(*found: FakeReplica) -> AsyncIterator[list[str]]:
    servers = []
    for one in found:
        settings = HttpSettings(port=0)
        sock = listen(settings.host, 0)
        server = QuietServer(one, settings)
        servers.append((server, asyncio.create_task(server.serve(sockets=[sock])), sock.getsockname()[1]))
    try:
        yield [f"http://127.0.0.1:{port}" for _, _, port in servers]
    finally:
        for server, serving, _ in servers:
            await server.end(serving)
