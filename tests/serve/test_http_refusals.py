"""Whatever clients send, the server refuses it with a sentence and goes on serving."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest
from http_server import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    return error


def assert_serves(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": "still there?", "max_tokens": 2})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": 1e999}',
        b"[" * 200_000,
        b'{"prompt": ' + b"[" * 200_000,
    ],
    ids=range(11),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": 3, "content": "x"}]}, None),
        (CHAT, {"messages": HELLO, "n": "three"}, "n"),
        (CHAT, {"messages": HELLO, "n": 0}, "n"),
        (CHAT, {"messages": HELLO, "n": 100_000}, "n"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "seed": 2**80}, "seed"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logit_bias": {"9999": 1}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop"),
        (CHAT, {"messages": HELLO, "stop": [str(n) for n in range(100)]}, "stop"),
        (CHAT, {"messages": HELLO, "priority": "urgent"}, "priority"),
        (CHAT, {"messages": HELLO, "deadline_ms": 0}, "deadline_ms"),
        (CHAT, {"messages": HELLO, "stream_options": {"usage": True}}, "stream_options"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "schema"),
        (CHAT, {"messages": HELLO, "regex": "a", "choice": ["b"]}, None),
        (CHAT, {"messages": HELLO, "regex": "("}, None),
        (CHAT, {"messages": HELLO, "grammar": "start"}, None),
        (CHAT, {"messages": HELLO, "tools": [{"type": "web_search"}]}, None),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, None),
        (COMPLETIONS, {"prompt": [[]]}, None),
        (COMPLETIONS, {"prompt": [1, "x"]}, None),
        (COMPLETIONS, {"prompt": [260]}, None),
        (COMPLETIONS, {"prompt": [-1]}, None),
        (COMPLETIONS, {"prompt": [2**70]}, None),
        (COMPLETIONS, {"prompt": {"prompt_token_ids": [1]}}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 1000}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "1"}]}, None),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {"input": "x", "dimensions": 33}, "dimensions"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/tokenize", {}, "prompt"),
    ],
)
def test_a_wrong_value_is_named(client: httpx.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    assert refused(client.post(path, json=body))["param"] == param


def test_a_prompt_of_ten_megabytes(client: httpx.Client) -> None:
    for body in ({"prompt": "mill " * 2_000_000}, {"prompt": [7] * 3_000_000}):
        assert refused(client.post(COMPLETIONS, json=body))["code"] == "context_length_exceeded"
    huge = [{"role": "user", "content": "mill " * 2_000_000}]
    assert refused(client.post(CHAT, json={"messages": huge}))["code"] == "context_length_exceeded"
    begun = [*HELLO, {"role": "assistant", "content": "mill " * 2_000_000}]
    answer = client.post("/v1/messages", json={"messages": begun, "max_tokens": 2})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("the prompt has ")
    assert_serves(client)


def test_a_body_over_the_limit(client: httpx.Client) -> None:
    assert refused(client.post(COMPLETIONS, content=b" " * 17_000_000), 413)["code"] == "request_too_large"
    chunks = (b" " * 1_000_000 for _ in range(20))  # without a length in the head
    with contextlib.suppress(httpx.WriteError):  # the connection was closed while the client was still sending
        assert client.post(COMPLETIONS, content=chunks).status_code == 413
    assert_serves(client)


def test_a_body_of_millions_of_parts(client: httpx.Client) -> None:
    for part in (b"[]", b"[1]", b"{}", b'{"a" :1}', b'"ab"'):
        several = b",".join([part] * (15_000_000 // (len(part) + 1)))
        assert "more than 200000" in refused(client.post(COMPLETIONS, content=b'{"prompt": [%b]}' % several))["message"]
    several = b",".join(b'"%d" :1' % number for number in range(1_000_000))
    assert "more than 200000" in refused(client.post(COMPLETIONS, content=b'{"logit_bias": {%b}}' % several))["message"]
    for text in ("x{y}[z] " * 1_000_000, "a, b: c, d: e; " * 500_000):  # these are no parts
        answer = client.post(COMPLETIONS, json={"prompt": text})
        assert refused(answer)["code"] == "context_length_exceeded"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def test_a_deeply_nested_schema(client: httpx.Client) -> None:
    text = json.dumps({"type": "x"})
    for levels in (100, 400):
        format = {"type": "json_schema", "json_schema": {"name": "deep", "schema": deep(levels)}}
        refused(client.post(CHAT, json={"messages": HELLO, "response_format": format}))
        tool = {"type": "function", "function": {"name": "f", "parameters": deep(levels)}}
        refused(client.post(CHAT, json={"messages": HELLO, "tools": [tool], "tool_choice": "required"}))
    refused(client.post(CHAT, json={"messages": HELLO, "structured_outputs": {"json": text}}))
    huge = {"type": "object", "properties": {str(n): {"type": "string"} for n in range(30_000)}}
    format = {"type": "json_schema", "json_schema": {"name": "huge", "schema": huge}}
    refused(client.post(CHAT, json={"messages": HELLO, "response_format": format}))
    assert_serves(client)


def test_what_is_not_there(client: httpx.Client) -> None:
    assert refused(client.get("/v1/nothing"), 404)["code"] == "not_found"
    refused(client.get(CHAT), 405)
    refused(client.delete("/v1/models"), 405)
    assert client.get("/v1/messages").json()["type"] == "error"


def test_numbers_beyond_all_bounds_mean_all_there_is(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 10**30, "top_k": 10**30, "stop": ["a", "e"], "seed": 1, "min_p": 0}
    assert client.post(COMPLETIONS, json=body).status_code == 200


def test_tokens_and_text(client: httpx.Client) -> None:
    found = client.post("/tokenize", json={"prompt": "müll", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 5 and found["max_model_len"] == 2048
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "müll"}
    chat = client.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"] == "<s>user: hi<|end|>"


def test_health_and_metrics(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"live": True}
    ready = client.get("/health/ready")
    assert ready.status_code == 200 and ready.json()["state"] == "ready"
    assert_serves(client)
    text = client.get("/metrics").text
    for name in (
        "tokenmill_requests_active",
        "tokenmill_requests_running",
        "tokenmill_requests_queued",
        "tokenmill_time_to_first_token_seconds_bucket",
        "tokenmill_inter_token_seconds_bucket",
        "tokenmill_output_tokens_total",
        "tokenmill_prefix_cache_hit_tokens_total",
        "tokenmill_preemptions_total",
        "tokenmill_evictions_total",
        "tokenmill_engine_memory_bytes",
        "tokenmill_engine_restarts_total",
        'tokenmill_http_requests_total{route="/v1/completions",status="200"}',
    ):
        assert f"\n{name}" in text, name
    assert client.get("/").status_code == 200
