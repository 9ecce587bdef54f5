"""Long texts hold up nobody but those who send them: they are refused unread, or worked on away from the event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_models import write_model
from http_server import http_around
from sim_engine import MAX_LEN
from sim_service import make, run
from tokenizers import AddedToken

from tokenmill.model.tokenizer import Tokenizer
from tokenmill.serve.engine_client.service import Service

LONG_TOKEN = "<|" + "x" * 400 + "|>"
MOST = len(LONG_TOKEN) * MAX_LEN  # characters that might fit
TEXT = "The mill by the river. " * 30_000  # less than that, and far too many tokens
FLOOD = "水車は川" * 400_000  # more


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ENDPOINTS = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": message(text)},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": message(text), "max_tokens": 4},
    "/v1/messages/count_tokens": lambda text: {"messages": message(text)},
    "/v1/embeddings": lambda text: {"input": text},
    "/tokenize": lambda text: {"prompt": text},
}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Service, int]]:
    """A simulated engine behind a real tokenizer; yields the port."""
    service = make()
    service.tokenizer = Tokenizer.from_directory(write_model(folder))
    service.tokenizer._backend.add_special_tokens([AddedToken(LONG_TOKEN, special=True)])
    await service.start()
    try:
        async with http_around(service) as url:
            yield service, int(url.rpartition(":")[2])
    finally:
        await service.stop()


def post(port: int, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """From a thread: what a client does with its own text is not the server's doing."""
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head % (path.encode(), len(body)))
        connection.sendall(body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return int(answer[9:12]), json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_long_text_is_tokenized_in_a_thread_and_a_flood_not_at_all(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[threading.Thread] = []
    tokenized: list[int] = []
    original = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        if len(text) > 1000:
            where.append(threading.current_thread())
        ids = original(self, text, *args, **options)
        tokenized.append(len(text))
        return ids

    monkeypatch.setattr(Tokenizer, "encode", noted)

    async def main() -> None:
        async with served(tmp_path) as (_, port):
            for text in (TEXT, FLOOD):
                body = json.dumps(ENDPOINTS[path](text), ensure_ascii=False).encode()
                status, answer = await asyncio.to_thread(post, port, path, body)
                said = answer["error"]["message"]
                assert status == 400 and said.startswith("the prompt has ") and f"max_model_len = {MAX_LEN}" in said
            assert f"which hold {MOST} characters at most" in said
            fits = json.dumps(ENDPOINTS[path]("a" * 1500)).encode()
            assert (await asyncio.to_thread(post, port, path, fits))[0] == 200

    run(main())
    assert len(where) >= 3 and threading.main_thread() not in where
    assert max(tokenized) < 5000  # what was refused came to no ids


def test_the_event_loop_goes_on_while_long_texts_arrive(tmp_path: Path) -> None:
    """The longest stall is a small part of the time that the texts take, however busy the machine is."""

    async def main() -> tuple[float, float]:
        async with served(tmp_path) as (_, port):
            body = json.dumps({"prompt": TEXT}).encode()
            stalls: list[float] = []

            async def probe() -> None:
                last = time.perf_counter()
                while True:
                    await asyncio.sleep(0.001)
                    now = time.perf_counter()
                    stalls.append(now - last)
                    last = now

            probing = asyncio.create_task(probe())
            began = time.perf_counter()
            for _ in range(4):
                await asyncio.to_thread(post, port, "/v1/completions", body)
            took = (time.perf_counter() - began) / 4
            probing.cancel()
            return sorted(stalls)[-2], took  # one may be the machine's doing

    stall, took = run(main())
    assert stall < took / 2, f"others waited for {stall:.2f} s of the {took:.2f} s that a text takes"


def test_much_that_is_no_long_text_is_worked_on_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of messages, and arguments of tools to be parsed."""
    import tokenmill.serve.api.chat_messages as chat_messages

    where: set[str] = set()
    original = chat_messages._normal

    def noted(*args: Any) -> dict[str, Any]:
        where.add("loop" if threading.current_thread() is threading.main_thread() else "thread")
        return original(*args)

    monkeypatch.setattr(chat_messages, "_normal", noted)

    async def main() -> None:
        async with served(tmp_path) as (_, port):
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
                name = "input" if path == "/v1/responses" else "messages"
                asked = {name: message("a") * 5000} | ({"max_tokens": 4} if path == "/v1/messages" else {})
                status, _ = await asyncio.to_thread(post, port, path, json.dumps(asked).encode())
                assert status == 400 and where == {"thread"}, path
                where.clear()

    run(main())


def test_a_long_text_does_not_queue_before_short_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as (service, _):
            go = threading.Event()
            stuck = [asyncio.create_task(service.texts.run(1 << 20, go.wait)) for _ in range(40)]
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(service.texts.run(1500, service._processor.encode, "a" * 1500), 10)
            go.set()
            await asyncio.gather(*stuck)

    run(main())
