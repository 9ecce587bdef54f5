"""What a foreign web page or a greedy client sends is refused, and everybody else is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server, simulated
from sim_service import assert_nothing_left, eventually, run

from tokenmill.serve.http.origin_guard import OriginGuard
from tokenmill.serve.settings import HttpSettings

PATH = "/v1/completions"


def body(prompt: list[int], tokens: int = 2, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def connect(url: str) -> Any:
    return asyncio.open_connection(*url.removeprefix("http://").split(":"), limit=1 << 20)


# -- web pages -------------------------------------------------------------------------------------------------------


def refusal(headers: list[tuple[str, str]], method: str = "POST", **settings: Any) -> str | None:
    """The code with which a request is refused; None: it is let in."""
    scope = {"type": "http", "method": method, "path": PATH, "headers": []}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers]
    problem = OriginGuard(None, HttpSettings(**settings))._problem(scope)  # type: ignore[arg-type]
    return None if problem is None else problem.code


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "a.localhost"]
)
def test_hosts_that_nobody_else_can_own(host: str) -> None:
    assert refusal([("host", host)]) is None
    assert refusal([("host", host)], "GET") is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_name_that_was_pointed_here_is_refused(host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        assert refusal([("host", host)], method) == "host_not_allowed"
    assert refusal([("host", "localhost"), ("host", host)]) == "host_not_allowed"
    assert refusal([("host", host)], host="::1") == "host_not_allowed"
    assert refusal([("host", host)], host="localhost") == "host_not_allowed"


def test_whose_name_is_looked_at(tmp_path: Path) -> None:
    named = [("host", "llm.example:443")]
    assert refusal(named, hosts=("llm.example",)) is None
    assert refusal(named, hosts=("*",)) is None
    assert refusal(named, hosts=("other.example",)) == "host_not_allowed"
    assert refusal(named, hosts=("other.example",), host="0.0.0.0") == "host_not_allowed"
    assert refusal(named, keys=tmp_path / "keys.json") is None  # a page has no key
    assert refusal(named, host="0.0.0.0") is None  # everybody who reaches the port may ask
    assert refusal([]) is None  # no browser leaves it out


EVIL = ("origin", "https://evil.example")


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ([], False),
        ([EVIL], True),
        ([("origin", "null")], True),
        ([EVIL, ("sec-fetch-site", "cross-site")], True),
        ([("sec-fetch-site", "cross-site")], True),
        ([("sec-fetch-site", "same-site"), ("origin", "http://localhost:3000")], True),
        ([("origin", "http://localhost:9000")], True),
        ([("origin", "http://localhost:8000")], False),
        ([("sec-fetch-site", "same-origin"), ("origin", "https://a.proxy.example")], False),
        ([("sec-fetch-site", "none")], False),
        ([("origin", "https://app.example")], False),
        ([("origin", "https://app.example"), ("sec-fetch-site", "cross-site")], False),
    ],
)
def test_pages_of_other_origins(headers: list[tuple[str, str]], refused: bool) -> None:
    settings = {"origins": ("https://App.example",)}
    said = refusal([("host", "localhost:8000"), *headers], **settings)
    assert said == ("origin_not_allowed" if refused else None)
    assert refusal([("host", "localhost:8000"), *headers], "GET", **settings) is None
    assert refusal([("host", "localhost:8000"), *headers], origins=("*",)) is None


def test_a_page_cannot_make_a_browser_ask() -> None:
    """The whole way: what a form or fetch(..., {mode: "no-cors"}) of another site sends."""

    async def main() -> None:
        async with simulated() as (service, url), httpx.AsyncClient(base_url=url) as client:
            simple = {"origin": "https://evil.example", "content-type": "text/plain"}
            refused = await client.post(PATH, content=json.dumps(body([1])), headers=simple)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"
            rebound = await client.get("/v1/models", headers={"host": "evil.example"})
            assert rebound.status_code == 403 and "--allowed-host" in rebound.json()["error"]["message"]
            shaped = await client.post("/v1/messages", json={}, headers={"host": "evil.example"})
            assert shaped.json()["type"] == "error"
            assert service.stats().accepted == 0
            counted = (await client.get("/metrics")).text
            assert 'tokenmill_http_errors_total{code="host_not_allowed",status="403"} 2.0' in counted
            own = {"origin": url, "sec-fetch-site": "same-origin"}
            answer = await client.post(PATH, json=body([1]), headers=own)
            assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in answer.headers

    run(main())


def test_origins_that_were_allowed_may_ask() -> None:
    async def main() -> None:
        allowed = {"origins": ("https://app.example",)}
        async with simulated(http=allowed) as (_, url), httpx.AsyncClient(base_url=url) as client:
            page = {"origin": "https://app.example"}
            asks = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            assert (await client.options(PATH, headers=asks)).status_code == 200
            answer = await client.post(PATH, json=body([1]), headers=page)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page["origin"]
            evil = await client.post(PATH, json=body([1]), headers={"origin": "https://evil.example"})
            assert evil.status_code == 403

    run(main())


# -- heads without end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endless",
    [
        (b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nx: ", b"x" * 65536),
        (b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n" * 10_000),
        (b"GET /", b"x" * 65536),
        (b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;", b"x" * 65536),
    ],
    ids=["value", "fields", "path", "chunk"],
)
def test_a_head_without_end(endless: tuple[bytes, bytes]) -> None:
    async def main() -> None:
        async with simulated() as (_, url):
            _, writer = await connect(url)
            writer.write(endless[0])
            sent = 0
            try:
                while sent < 64 << 20:  # far more than the sockets hold on the way
                    writer.write(endless[1])
                    sent += len(endless[1])
                    await writer.drain()
                    await asyncio.sleep(0)
                raise AssertionError("it takes everything")
            except ConnectionError:
                pass
            assert sent < 32 << 20
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/health/live")).status_code == 200

    run(main())


def test_a_long_head_is_refused_with_a_sentence() -> None:
    async def main() -> None:
        async with simulated() as (_, url):
            reader, writer = await connect(url)
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 70_000)
            said = await reader.read()
            assert said.startswith(b"HTTP/1.1 431 ") and b"head_too_long" in said
            writer.close()

    run(main())


def test_long_bodies_are_no_long_heads() -> None:
    async def main() -> None:
        async with simulated() as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
            spaces = json.dumps(body([1])).encode() + b" " * 3_000_000
            assert (await client.post(PATH, content=spaces)).status_code == 200

            async def chunks() -> Any:
                for at in range(0, len(spaces), 10_000):
                    yield spaces[at : at + 10_000]

            assert (await client.post(PATH, content=chunks())).status_code == 200

    run(main())


def test_a_client_that_asks_twice_and_leaves() -> None:
    """A second request behind the first one must not hide that the client has gone."""

    async def main() -> None:
        async with simulated({"step": 0.01}) as (service, url):
            _, writer = await connect(url)
            asked = json.dumps(body([1, 2], 2000)).encode()
            head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(asked))
            writer.write(head + asked)
            await eventually(lambda: service.stats().active == 1)
            writer.write(head + asked)
            await asyncio.sleep(0.05)
            writer.transport.abort()
            await eventually(lambda: service.stats().active == 0, 5)
            await eventually(lambda: service.stats().engine.running == 0, 5)
            await assert_nothing_left(service)

    run(main())


# -- too much of everything ------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"bad_words": [f"w{n}" for n in range(2000)]}, "bad_words"),
        ({"bad_words": ["x" * 20_000]}, "bad_words"),
        ({"stop": ["a" * 20_000]}, "stop"),
        ({"stop": "a" * 20_000}, "stop"),
        ({"stop_token_ids": [7] * 2000}, "stop_token_ids"),
        ({"logit_bias": {str(n): 1.0 for n in range(2000)}}, "logit_bias"),
        ({"cache_salt": "s" * 2000}, "cache_salt"),
        ({"messages": HELLO * 30_000}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]}, None),
        ({"chat_template_kwargs": {f"k{n}": 1 for n in range(100)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs"),
    ],
)
def test_lists_have_an_end(server: Server, asked: dict[str, Any], param: str | None) -> None:
    body = {"messages": HELLO, "max_tokens": 2, **asked}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_lists_of_a_usual_length_are_fine(server: Server) -> None:
    body = {
        "messages": HELLO * 20,
        "max_tokens": 2,
        "bad_words": ["mill"] * 100,
        "stop": ["a" * 100, "b"],
        "stop_token_ids": [7] * 100,
        "logit_bias": {str(n): 1.0 for n in range(200)},
        "cache_salt": "s" * 100,
        "chat_template_kwargs": {"style": "plain"},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
