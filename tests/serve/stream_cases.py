"""Streams of every API, and what they say whatever the pieces: to hold one that was broken against one that was not."""

from __future__ import annotations

import json
from typing import Any

import httpx

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


async def events(http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, told) for _, name, told in await events_with_ids(http, url, path, body)]


async def events_with_ids(
    http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any], last: str = "", most: int = 1 << 40
) -> list[tuple[str, str, Any]]:
    """(id, name, content) of a stream, or of its first `most` bytes; `last` is the id of the last one that is known."""
    found: list[tuple[str, str, Any]] = []
    data = b""
    headers = {"last-event-id": last} if last else {}
    async with http.stream("POST", url + path, json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for part in response.aiter_raw():
            data += part
            if len(data) >= most:
                break
    for one in data[:most].split(b"\n\n")[:-1]:
        id = name = content = ""
        for line in one.decode().split("\n"):
            field, _, value = line.partition(": ")
            if field == "id":
                id = value
            elif field == "event":
                name = value
            elif field == "data":
                content = value if value == "[DONE]" else json.loads(value)
            else:
                assert line == ": still here", line
        found.append((id, name, content))
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
        told["usage"] = {name: one for name, one in told["usage"].items() if name != "prompt_tokens_details"}
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
