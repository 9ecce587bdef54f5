"""Connections and requests come and go, are slow or are dropped; nothing is lost and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
import sim_service
from http_server import Server, http_around, simulated
from sim_engine import POISON
from sim_service import assert_nothing_left, eventually, run, solo

from tokenmill import SamplingParams
from tokenmill.serve.engine_client.service import Service

PATH = "/v1/completions"


def body(prompt: list[int], tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def connect(url: str) -> Any:
    return asyncio.open_connection(*url.removeprefix("http://").split(":"))


def head(content: bytes, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), size, content)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def test_clients_that_leave_free_everything() -> None:
    async def main() -> None:
        async with simulated({"step": 0.01}) as (service, url):
            writers = []
            for number in range(40):
                _, writer = await connect(url)
                asked = body([1 + number, 2, 3], 2000, stream=number % 2 == 0, n=1 + number % 3)
                writer.write(head(json.dumps(asked).encode()))
                writers.append(writer)
            await eventually(lambda: service.stats().active == 40)
            for number, writer in enumerate(writers):
                writer.transport.abort() if number % 4 else writer.close()
            await eventually(lambda: service.stats().active == 0, 5)
            await eventually(lambda: service.stats().engine.running == 0, 5)
            await assert_nothing_left(service)
            assert service.stats().finished == {"cancelled": 40}

    run(main())


def test_a_stream_of_ids_is_what_the_model_says() -> None:
    async def main() -> None:
        async with simulated() as (_, url), httpx.AsyncClient(base_url=url) as client:

            async def ask(number: int) -> None:
                prompt = [number + 1, 5, 6]
                asked = body(prompt, 30, stream=True, return_token_ids=True)
                async with client.stream("POST", PATH, json=asked) as response:
                    text = (await response.aread()).decode()
                tokens = [token for event in events(text) for token in event["choices"][0]["token_ids"]]
                said = solo(prompt, SamplingParams(temperature=0, max_tokens=30))
                assert tokens == said

            await asyncio.gather(*(ask(number) for number in range(32)))

    run(main())


def test_a_body_that_comes_too_slowly() -> None:
    async def main() -> None:
        async with simulated(http={"body_seconds": 0.3}) as (service, url):
            reader, writer = await connect(url)
            writer.write(head(b'{"prompt": ', length=100))
            answer = (await asyncio.wait_for(reader.read(), 5)).decode()
            assert answer.startswith("HTTP/1.1 408") and "did not arrive within 0.3 s" in answer
            writer.close()
            await assert_nothing_left(service)

    run(main())


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nslow: "])
def test_a_head_that_does_not_come(sent: bytes) -> None:
    async def main() -> None:
        async with simulated(http={"head_seconds": 0.3}) as (_, url):
            reader, writer = await connect(url)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            # The second request of a connection has no more time than the first.
            reader, writer = await connect(url)
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.write(sent or b"G")
            await asyncio.wait_for(reader.read(), 5)
            writer.close()

    run(main())


def test_a_client_that_reads_nothing_is_dropped() -> None:
    async def main() -> None:
        async with simulated({"step": 0.0005}, http={"write_seconds": 0.5}) as (service, url):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = url.removeprefix("http://").split(":")
            sock.connect((host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
            asked = body([1, 2, 3], 1900, stream=True, logprobs=20, n=16)
            writer.write(head(json.dumps(asked).encode()))
            await reader.readuntil(b"\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await eventually(lambda: service.stats().finished.get("cancelled") == 1, 20)
            writer.close()
            await assert_nothing_left(service)

    run(main())


def test_more_connections_than_allowed() -> None:
    async def main() -> None:
        async with simulated(http={"max_connections": 8}) as (_, url):
            held = [await connect(url) for _ in range(8)]
            reader, _ = await connect(url)
            assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 503")
            for _, writer in held:
                writer.close()
            await asyncio.sleep(0.05)
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.post(PATH, json=body([1], 2))).status_code == 200

    run(main())


def test_a_thousand_idle_connections_disturb_nobody() -> None:
    async def main() -> None:
        async with simulated() as (_, url):
            held = [await connect(url) for _ in range(1000)]
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.post(PATH, json=body([1], 2))).status_code == 200
            for _, writer in held:
                writer.close()

    run(main())


def test_silence_is_bridged_by_comments() -> None:
    async def main() -> None:
        async with simulated({"step": 0.5}, http={"beat_seconds": 0.1}) as (_, url):
            async with httpx.AsyncClient(base_url=url) as client:
                answer = await client.post(PATH, json=body([1, 2], 3, stream=True, return_token_ids=True), timeout=20)
            assert answer.text.count(": still here") >= 3
            assert len(events(answer.text)) >= 3 and answer.text.endswith("data: [DONE]\n\n")

    run(main())


def test_a_full_queue_says_when_to_come_back() -> None:
    async def main() -> None:
        async with simulated({"step": 0.02}, max_queued_tokens=500) as (service, url):
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                asks = [client.post(PATH, json=body([7] * 200, 100)) for _ in range(12)]
                answers = await asyncio.gather(*asks)
            statuses = [answer.status_code for answer in answers]
            assert 200 in statuses and 429 in statuses and set(statuses) == {200, 429}
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
            await assert_nothing_left(service)

    run(main())


def test_a_deadline_that_passes() -> None:
    async def main() -> None:
        async with simulated({"step": 0.05}) as (service, url):
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                late = await client.post(PATH, json=body([1, 2], 1000, deadline_ms=300))
                assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
                streamed = await client.post(PATH, json=body([1, 2], 1000, deadline_ms=300, stream=True))
                assert streamed.status_code == 200
                assert events(streamed.text)[-1]["error"]["code"] == "deadline_exceeded"
            await assert_nothing_left(service)

    run(main())


def test_a_request_that_breaks_the_engine_is_told_the_cause() -> None:
    async def main() -> None:
        async with simulated({"killed": POISON}) as (service, url):
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                poisoned, sound = await asyncio.gather(
                    client.post(PATH, json=body([1, POISON, 2])), client.post(PATH, json=body([1, 2, 3], 60))
                )
            assert sound.status_code == 200 and sound.json()["usage"]["completion_tokens"] == 60
            assert poisoned.status_code == 500 and "engine" in poisoned.json()["error"]["message"]
            await assert_nothing_left(service)

    run(main())


def test_a_draining_service_finishes_streams_and_lets_nobody_in() -> None:
    async def main() -> None:
        async with simulated({"step": 0.01}) as (service, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
            running = asyncio.create_task(
                client.post(PATH, json=body([1, 2, 3], 100, stream=True, return_token_ids=True))
            )
            await eventually(lambda: service.stats().active == 1)
            draining = asyncio.create_task(service.drain(20))
            await asyncio.sleep(0.05)
            refused = await client.post(PATH, json=body([1], 2))
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert (await client.get("/health/ready")).status_code == 503
            assert (await client.get("/health/live")).status_code == 200
            assert await draining == 0
            said = [token for event in events((await running).text) for token in event["choices"][0]["token_ids"]]
            assert said == solo([1, 2, 3], SamplingParams(temperature=0, max_tokens=100))

    run(main())


def test_a_second_model_answers_while_the_first_cannot() -> None:
    async def main() -> None:
        async with sim_service.opened() as second:
            first = Service(sim_service.make().config, degrade=second)  # never started
            async with http_around(first) as url, httpx.AsyncClient(base_url=url) as client:
                answer = await client.post(PATH, json=body([1, 2], 5))
                assert answer.status_code == 200 and answer.headers["x-tokenmill-degraded"] == "sim"
                assert answer.json()["model"] == "sim"
                assert (await client.get("/health/ready")).status_code == 200
            async with http_around(sim_service.make()) as url, httpx.AsyncClient(base_url=url) as client:
                alone = await client.post(PATH, json=body([1, 2], 5))
                assert alone.status_code == 503 and "server is starting" in alone.json()["error"]["message"]
                assert (await client.get("/health/live")).status_code == 200
                assert (await client.get("/v1/models")).status_code == 200

    run(main())


def test_sigterm_under_load_drops_nothing(chat_model: str) -> None:
    server = Server.start(chat_model, "--drain-seconds", "60")

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        asked = {"prompt": f"mill {number}", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        answer = await client.post(PATH, json=asked)
        return answer.text

    async def main() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asks = [asyncio.create_task(ask(client, number)) for number in range(24)]
            for _ in range(2000):
                stats = (await client.get("/health/ready")).json()
                if stats["active"] == 24:
                    break
                await asyncio.sleep(0.005)
            server.process.terminate()
            return await asyncio.gather(*asks)

    texts = asyncio.run(main())
    for text in texts:
        assert text.endswith("data: [DONE]\n\n") and events(text)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(30) == 0
    assert any('"handed_back": 0' in line for line in server.lines)


def test_sigterm_hands_back_what_does_not_end_in_time(chat_model: str) -> None:
    server = Server.start(chat_model, "--drain-seconds", "0.2")

    async def main() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = {"prompt": "mill", "max_tokens": 2000, "ignore_eos": True, "stream": True}
            task = asyncio.create_task(client.post(PATH, json=asked))
            while (await client.get("/health/ready")).json()["active"] == 0:
                await asyncio.sleep(0.01)
            server.process.terminate()
            return (await task).text

    assert events(asyncio.run(main()))[-1]["error"]["message"].startswith("the server is shutting down")
    assert server.process.wait(30) == 0
