"""How answers reach their readers and how they end: nothing is built in vain, nobody works for those who left."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from typing import Any

import httpx
import pytest
from http_server import Server, simulated
from sim_service import assert_nothing_left, embed, eventually, greedy, make, opened, run, solo

from tokenmill.outputs import RequestOutput
from tokenmill.request_state import RequestState
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.server import _drain, _Server, listen
from tokenmill.serve.settings import HttpSettings

PATH = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def body(prompt: list[int], tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def test_tokens_are_sent_as_they_are_made() -> None:
    async def main() -> None:
        async with simulated({"step": 0.01}) as (service, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
            asked = body([1, 2], 1900, stream=True, return_token_ids=True)  # which takes 19 s
            async with client.stream("POST", PATH, json=asked) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        break
                assert json.loads(line[6:])["choices"][0]["token_ids"] and service.stats().active == 1

    run(main())


def sent_tokens(text: str) -> float:
    return next(float(line.split()[1]) for line in text.splitlines() if "token_to_socket_seconds_count" in line)


def test_an_answer_that_is_not_streamed_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[RequestOutput] = []
    output = RequestState.output
    monkeypatch.setattr(RequestState, "output", lambda self: built.append(output(self)) or built[-1])

    async def main() -> None:
        async with simulated() as (service, url), httpx.AsyncClient(base_url=url) as client:
            answer = await client.post(PATH, json=body([1, 2, 3], 40, return_token_ids=True))
            assert answer.json()["choices"][0]["token_ids"] == solo([1, 2, 3], greedy(40))
            assert len(built) == 1
            stream = await service.submit([1, 2, 3], greedy(40))
            assert (await stream.last()).outputs[0].token_ids == solo([1, 2, 3], greedy(40)) and len(built) == 2

    run(main())


def test_the_way_of_a_token_to_the_socket_is_measured() -> None:
    async def main() -> None:
        async with simulated({"step": 0.05}) as (_, url), httpx.AsyncClient(base_url=url) as client:
            await client.post(PATH, json=body([1, 2], 20))
            assert sent_tokens((await client.get("/metrics")).text) == 0  # nothing was streamed
            await client.post(PATH, json=body([1, 2], 20, stream=True, return_token_ids=True))
            text = (await client.get("/metrics")).text
            assert 10 <= sent_tokens(text) <= 20  # tokens that wait for the same moment count once
            total = next(float(line.split()[1]) for line in text.splitlines() if "token_to_socket_seconds_sum" in line)
            assert 0 < total < 5

    run(main())


def test_a_slow_reader_misses_nothing() -> None:
    async def main() -> None:
        async with simulated({"step": 0.001}) as (service, url):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = url.removeprefix("http://").split(":")
            sock.connect((host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
            asked = json.dumps(body([1, 2, 3], 500, stream=True, logprobs=20, return_token_ids=True, n=4)).encode()
            head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (PATH.encode(), len(asked)) + asked)
            text = await reader.readuntil(b"\r\n\r\n")
            await eventually(lambda: service.stats().active == 0)  # by then, far more was said than a socket holds
            while part := await reader.read(65536):
                text += part
                await asyncio.sleep(0.001)
            writer.close()
        data = b"".join(_dechunked(text.partition(b"\r\n\r\n")[2]))
        said: dict[int, list[int]] = {}
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                said.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert data.endswith(b"data: [DONE]\n\n") and len(said) == 4
        assert all(tokens == solo([1, 2, 3], greedy(500)) for tokens in said.values())

    run(main())


def _dechunked(data: bytes) -> list[bytes]:
    parts = []
    while (size := int(data.partition(b"\r\n")[0], 16)) > 0:
        data = data.partition(b"\r\n")[2]
        parts.append(data[:size])
        data = data[size + 2 :]
    return parts


def test_vectors_that_nobody_waits_for_are_not_computed() -> None:
    async def main() -> None:
        async with simulated({"step": 0.05}) as (service, url):
            asked = json.dumps({"input": [[5] * (1 + number) for number in range(200)]}).encode()
            _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(asked) + asked)
            await eventually(lambda: len(service._active) == 200)
            writer.transport.abort()
            await eventually(lambda: not service._active, 5)
            assert await service.view() is not None  # which brings the count of steps
            steps = service.stats().engine.steps
            assert await embed(service, [[5, 6]]) == [[2.0, 11.0]]
            await assert_nothing_left(service)
            assert service.stats().engine.steps - steps < 10  # the 200 would have taken about 80
            assert not service._supervisor._busy.is_set()

    run(main())


def test_one_wrong_text_ends_the_others_of_its_request() -> None:
    async def main() -> None:
        async with opened({"step": 0.05}) as service:
            job = asyncio.create_task(embed(service, [[5]] * 100))
            await eventually(lambda: service._active)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            await eventually(lambda: not service._active, 5)

    run(main())


def test_a_request_that_the_engine_cannot_do_is_the_clients_error() -> None:
    """The simulated engine has no grammars, which only turns out when the request is there."""

    async def main() -> None:
        async with simulated() as (service, url), httpx.AsyncClient(base_url=url) as client:
            answer = await client.post(PATH, json=body([1, 2], choice=["a", "b"]))
            assert answer.status_code == 400 and "structured" in answer.json()["error"]["message"]
            streamed = await client.post(PATH, json=body([1, 2], choice=["a", "b"], stream=True))
            told = json.loads(streamed.text.partition("data: ")[2].partition("\n")[0])
            assert told["error"]["code"] == "invalid_value"
            assert not service._remote.at_fault
            await assert_nothing_left(service)

    run(main())


def test_the_end_of_a_grammar_is_no_stop_token(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        asked = {"messages": HELLO, "choice": ["yes", "no"], "max_tokens": 20}
        choice = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
        assert choice["message"]["content"] in ("yes", "no")
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        every = {"prompt": "x", "max_tokens": 20, "stop_token_ids": list(range(3, 260)), "return_token_ids": True}
        named = client.post(PATH, json=every).json()["choices"][0]
        assert named["finish_reason"] == "stop" and named["stop_reason"] == named["token_ids"][-1] >= 3


def test_vectors_that_are_not_done_in_time_are_handed_back() -> None:
    async def main() -> None:
        async with simulated({"step": 0.05}) as (service, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
            asking = asyncio.create_task(client.post("/v1/embeddings", json={"input": [[5] * 200] * 200}))
            await eventually(lambda: len(service._active) == 200)
            assert await service.drain(0.1) > 100
            answer = await asking
            assert answer.status_code == 503 and "send it again" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1

    run(main())


def test_a_service_that_is_stopped_in_the_middle_complains_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with opened({"step": 0.01}) as service:
            streams = [await service.submit([number, 2], greedy(1000)) for number in range(1, 9)]
            await eventually(lambda: all(stream.request_state.sequences[0].num_tokens for stream in streams))
        assert [(await stream.last()).error for stream in streams] == ["the server was stopped"] * 8
        streams.clear()
        gc.collect()  # a failure that nobody has asked for is told when it is forgotten

    run(main())
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


def test_what_the_second_model_answers_is_waited_for_too() -> None:
    async def main() -> None:
        async with opened({"step": 0.01}) as second:
            first = Service(make().config, degrade=second)  # never started
            http = HttpSettings(port=0)
            sock = listen(http.host, 0)
            address = f"http://{http.host}:{sock.getsockname()[1]}"
            server = _Server(http, first)
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            await eventually(lambda: server.started)
            async with httpx.AsyncClient(base_url=address, timeout=30) as client:
                asking = asyncio.create_task(client.post(PATH, json=body([1, 2], 60, return_token_ids=True)))
                await eventually(lambda: second.stats().active == 1)
                await _drain(server, serving, [second, first], 20)
                answer = await asking
            assert answer.status_code == 200 and answer.headers["x-tokenmill-degraded"] == "sim"
            assert answer.json()["choices"][0]["token_ids"] == solo([1, 2], greedy(60))
            await server.end(serving)

    run(main())
