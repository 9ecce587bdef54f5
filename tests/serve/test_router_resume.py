"""A stream that breaks at any byte goes on elsewhere as if nothing had been: every API, tools, log-probabilities."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from cluster import client, routed
from http_server import Server
from sim_service import run

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SAID = [{"role": "user", "content": "What do the mills of the river grind when it rains?"}]


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


async def events(http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    name = ""
    async with http.stream("POST", url + path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((name, line[6:] if line == "data: [DONE]" else json.loads(line[6:])))
            else:
                assert not line or line == ": still here", line
    return found


def chunks(found: list[tuple[str, Any]]) -> dict[str, Any]:
    """What chats and completions say, whatever the pieces."""
    assert found[-1][1] == "[DONE]"
    told: dict[str, Any] = {"ids": set(), "usage": None}
    for _, chunk in found[:-1]:
        assert "error" not in chunk, chunk
        told["ids"].add((chunk["id"], chunk["created"]))
        told["usage"] = chunk.get("usage") or told["usage"]
        for choice in chunk["choices"]:
            one = told.setdefault(choice["index"], {"text": "", "ids": [], "probs": [], "calls": {}, "roles": 0})
            delta = choice.get("delta", {})
            one["roles"] += "role" in delta
            one["text"] += choice.get("text") or delta.get("content") or ""
            one["ids"] += choice.get("token_ids") or []
            if choice["logprobs"]:
                probs = choice["logprobs"]
                one["probs"] += [rounded(each) for each in probs["content"]]
            for part in delta.get("tool_calls", []):
                call = one["calls"].setdefault(part["index"], {"ids": [], "name": "", "said": ""})
                call["ids"] += [part["id"]] if "id" in part else []
                call["name"] += part["function"].get("name", "")
                call["said"] += part["function"].get("arguments", "")
            if choice["finish_reason"]:
                assert "finish" not in one
                one["finish"] = (choice["finish_reason"], choice["stop_reason"])
    assert len(told.pop("ids")) == 1
    for one in (each for each in told.values() if isinstance(each, dict) and "calls" in each):
        for call in one["calls"].values():
            assert len(call.pop("ids")) == 1
    if told["usage"]:
        del told["usage"]["prompt_tokens_details"]
    return told


def rounded(entry: dict[str, Any]) -> Any:
    """A log-probability of a prompt that is read anew is the same up to rounding, as always."""
    best = [(one["token"], round(one["logprob"], 6)) for one in entry["top_logprobs"]]
    return entry["token"], round(entry["logprob"], 6), best


def message(found: list[tuple[str, Any]]) -> Any:
    names = [name for name, _ in found]
    assert names[0] == "message_start" and names[-1] == "message_stop" and names.count("message_start") == 1
    text = "".join(told["delta"].get("text", "") for name, told in found if name == "content_block_delta")
    blocks = [name for name in names if name in ("content_block_start", "content_block_stop")]
    [ending] = [told for name, told in found if name == "message_delta"]
    return text, blocks, ending["delta"], ending["usage"]["output_tokens"]


def response(found: list[tuple[str, Any]]) -> Any:
    assert [told["sequence_number"] for _, told in found] == list(range(len(found)))
    text = "".join(told["delta"] for name, told in found if name == "response.output_text.delta")
    deltas = [told for name, told in found if name == "response.output_text.delta"]
    probs = [rounded(one) for told in deltas for one in told["logprobs"]]
    last = found[-1][1]["response"]
    assert {told["response"]["id"] for _, told in found if "response" in told} == {last["id"]}
    [item] = last["output"]
    assert item["content"][0]["text"] == text
    assert [rounded(one) for one in item["content"][0]["logprobs"]] == probs
    return text, probs, last["status"], last["usage"]["output_tokens"]


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "completion": (
        "/v1/completions",
        {"prompt": ["The mill", "The river"], "max_tokens": 60, "n": 2, "seed": 4, "return_token_ids": True}
        | {"ignore_eos": True, "stream_options": {"include_usage": True}},
        chunks,
    ),
    "stop string": (
        "/v1/completions",
        {"prompt": "The mill", "max_tokens": 120, "seed": 5, "stop": ["a", "b"], "n": 2, "ignore_eos": True},
        chunks,
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": SAID, "max_tokens": 90, "seed": 6, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
        | {"stream_options": {"include_usage": True}},
        chunks,
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": SAID, "max_tokens": 120, "seed": 7, "tools": [WEATHER], "tool_choice": "required", "n": 2},
        chunks,
    ),
    "messages": ("/v1/messages", {"messages": SAID, "max_tokens": 90, "seed": 8}, message),
    "responses": (
        "/v1/responses",
        {"input": "What do they grind?", "max_output_tokens": 60, "seed": 9, "top_logprobs": 1},
        response,
    ),
}


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
